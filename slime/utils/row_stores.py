"""Rows of data files by number, without reading the files into memory: jsonl, parquet, Hugging Face `save_to_disk`."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Collection
from itertools import accumulate
from pathlib import Path
from typing import Any

DECODED_BYTES = 256 * 2**20  # of a parquet file: decoded once when it is smaller, else row groups as they are needed
Row = dict[str, Any]


class RowStore(ABC):
    """The rows of a file, read when they are asked for.

    Attributes:
        file: where they are.
        nbytes: size of the data on disk.
        columns: names of the columns; None where only the rows know.
    """

    file: Path
    nbytes: int
    columns: list[str] | None

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def row(self, number: int) -> Row:
        """Row `number`, values as written.

        Raises:
            ValueError: it can't be read; the message names file and line.
        """

    def where(self, number: int) -> str:
        """How messages call the row."""
        return f"{self.file} row {number}"


class JsonlRows(RowStore):
    """One JSON object per line; blank lines don't count. Holds 8 bytes per row: where it begins."""

    columns = None

    def __init__(self, file: Path) -> None:
        self.file = file
        self.nbytes = file.stat().st_size
        self._starts, self._blank = _line_starts(file)
        self._descriptor = os.open(file, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def row(self, number: int) -> Row:
        start, end = self._starts[number], self._starts[number + 1]
        line = os.pread(self._descriptor, end - start, start)
        try:
            row = json.loads(line.decode("utf-8-sig" if start == 0 else "utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{self.where(number)}: byte {line[error.start]:#04x} at position {error.start} is not UTF-8;"
                " convert the file (iconv -f LATIN1 -t UTF-8)"
            ) from error
        except json.JSONDecodeError as error:
            text = line.decode(errors="replace").strip()[:80]
            raise ValueError(
                f"{self.where(number)}: broken JSON ({error.msg} at column {error.colno}): {text}"
            ) from error
        if not isinstance(row, dict):
            raise ValueError(f"{self.where(number)}: a row must be a JSON object, this is {type(row).__name__}")
        return row

    def where(self, number: int) -> str:
        return f"{self.file}:{number + 1 + bisect_right(self._blank, number)}"


def _line_starts(file: Path) -> tuple[array[int], array[int]]:
    """Offsets of the lines that aren't blank, and the file's end; and for each blank line the rows before it."""
    starts, blank, position = array("q"), array("q"), 0
    with file.open("rb") as lines:
        for line in lines:
            (starts if line.strip() else blank).append(position if line.strip() else len(starts))
            position += len(line)
    starts.append(position)
    return starts, blank


class ParquetRows(RowStore):
    """A parquet file: decoded into Arrow memory when that is small, else the row groups last used.

    Args:
        columns: read these alone.
    """

    def __init__(self, file: Path, columns: Collection[str] | None = None) -> None:
        import pyarrow.parquet as pq

        self.file = file
        self.nbytes = file.stat().st_size
        self._parquet = pq.ParquetFile(file)
        self.columns = list(self._parquet.schema_arrow.names)
        self._wanted = None if columns is None else [name for name in self.columns if name in columns]
        groups = [self._parquet.metadata.row_group(i) for i in range(self._parquet.num_row_groups)]
        self._ends = list(accumulate(group.num_rows for group in groups))
        self._sizes = [group.total_byte_size for group in groups]
        self._decoded: OrderedDict[int, Any] = OrderedDict()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def row(self, number: int) -> Row:
        group = bisect_right(self._ends, number)
        first = self._ends[group - 1] if group else 0
        return _one(self._group(group), number - first)

    def _group(self, index: int) -> Any:
        if index in self._decoded:
            self._decoded.move_to_end(index)
            return self._decoded[index]
        room = DECODED_BYTES - self._sizes[index]
        while self._decoded and sum(self._sizes[i] for i in self._decoded) > room:
            self._decoded.popitem(last=False)
        self._decoded[index] = self._parquet.read_row_group(index, columns=self._wanted)
        return self._decoded[index]


class ArrowRows(RowStore):
    """A folder that `datasets.Dataset.save_to_disk` wrote: Arrow streams, mapped into memory."""

    def __init__(self, folder: Path) -> None:
        import pyarrow as pa

        self.file = folder
        names = [entry["filename"] for entry in json.loads((folder / "state.json").read_text())["_data_files"]]
        self.nbytes = sum((folder / name).stat().st_size for name in names)
        self.columns = []
        self._batches: list[Any] = []
        for name in names:
            reader = pa.ipc.open_stream(pa.memory_map(str(folder / name)))
            self.columns = list(reader.schema.names)
            self._batches += [batch for batch in reader if batch.num_rows]
        self._ends = list(accumulate(batch.num_rows for batch in self._batches))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def row(self, number: int) -> Row:
        index = bisect_right(self._ends, number)
        return _one(self._batches[index], number - (self._ends[index - 1] if index else 0))


def _one(table: Any, number: int) -> Row:
    return {name: table.column(i)[number].as_py() for i, name in enumerate(table.schema.names)}


class RowSlice:
    """A range of a store's rows, numbered from 0."""

    def __init__(self, store: RowStore, wanted: slice) -> None:
        self.store = store
        self._numbers = range(len(store))[wanted]

    def __len__(self) -> int:
        return len(self._numbers)

    def row(self, number: int) -> Row:
        return self.store.row(self._numbers[number])

    def where(self, number: int) -> str:
        return self.store.where(self._numbers[number])


def open_store(path: Path, columns: Collection[str] | None = None) -> RowStore:
    """The rows of a file or of a `save_to_disk` folder.

    Raises:
        FileNotFoundError: there is nothing at the path.
        ValueError: it is of no kind that can be read; for a folder with several splits the message lists them.
    """
    if path.is_dir():
        if (path / "state.json").is_file():
            return ArrowRows(path)
        splits = path / "dataset_dict.json"
        if splits.is_file():
            names = json.loads(splits.read_text())["splits"]
            raise ValueError(f"{path} has the splits {names}; give one of them, such as {path / names[0]}")
        raise ValueError(f"{path}: a folder, but not one that datasets' save_to_disk wrote (no state.json)")
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    if path.suffix == ".jsonl":
        return JsonlRows(path)
    if path.suffix == ".parquet":
        return ParquetRows(path, columns)
    raise ValueError(
        f"{path}: data files are .jsonl or .parquet, or folders of datasets' save_to_disk,"
        f" not {path.suffix or 'without a suffix'!r}"
    )
