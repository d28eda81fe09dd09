"""Rows of jsonl and parquet files, with `path@[a:b]` slices."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

DEFAULT_TOOL_KEY = "tools"  # a column that most data do not have
_SLICE = re.compile(r"^(?P<path>.+)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]$", re.DOTALL)


def split_slice(path: str) -> tuple[Path, slice]:
    """Take `file@[a:b]` apart; a path with another `@` in it is just a path.

    >>> split_slice("data/a@b.jsonl@[-2:]")
    (PosixPath('data/a@b.jsonl'), slice(-2, None, None))
    """
    match = _SLICE.match(path)
    if match is None:
        return Path(path), slice(None)
    start, stop = (int(match[name]) if match[name] not in ("", "-") else None for name in ("start", "stop"))
    return Path(match["path"]), slice(start, stop)


def iter_rows(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (where, row), `where` being "file:line" or "file row n" for messages. Values stay as written.

    Only the rows of the slice are parsed.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the suffix is neither .jsonl nor .parquet, or a line is not a JSON object.
    """
    file, wanted = split_slice(path)
    if not file.is_file():
        raise FileNotFoundError(f"no such file: {file}")
    readers = {".jsonl": (_count_jsonl, _iter_jsonl), ".parquet": (_count_parquet, _iter_parquet)}
    if file.suffix not in readers:
        raise ValueError(f"{file}: data files are .jsonl or .parquet, not {file.suffix or 'without a suffix'!r}")
    count, read = readers[file.suffix]
    if (wanted.start or 0) < 0 or (wanted.stop or 0) < 0:
        start, stop, _ = wanted.indices(count(file))
    else:
        start, stop = wanted.start or 0, wanted.stop
    for where, parse in islice(read(file), start, stop):
        yield where, parse()


def wanted_columns(
    prompt: str, label: str | None, tool: str | None, multimodal: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Role → column that some row must have. The tool column counts only when it isn't the flags' default."""
    wanted = {"prompt": prompt, "label": label, "tool": tool if tool != DEFAULT_TOOL_KEY else None}
    wanted |= {f"{kind} items": column for kind, column in (multimodal or {}).items()}
    return {role: column for role, column in wanted.items() if column is not None}


def require_columns(path: str, present: Collection[str], wanted: Mapping[str, str]) -> None:
    """Raise a ValueError when there are no rows, or none has a wanted column."""
    if not present:
        raise ValueError(f"{path}: no rows")
    for role, column in wanted.items():
        if column not in present:
            raise ValueError(f"{path}: no row has the {role} key {column!r}; the keys there are {sorted(present)}")


def check_file(path: str, wanted: Mapping[str, str], max_bytes: int) -> None:
    """Find what is wrong with a data file before anything is started.

    A parquet file's schema is checked; a jsonl file is read, unless it has more than `max_bytes`: then only whoever
    loads it will know.

    Raises:
        ValueError, FileNotFoundError: see `iter_rows` and `require_columns`.
    """
    file, _ = split_slice(path)
    if file.is_file() and file.suffix == ".parquet":
        import pyarrow.parquet as pq

        require_columns(path, pq.read_schema(file).names, wanted)
    elif not file.is_file() or file.suffix != ".jsonl" or file.stat().st_size <= max_bytes:
        present: set[str] = set()
        for _, row in iter_rows(path):
            present.update(row)
        require_columns(path, present, wanted)


def read_file(path: str) -> Iterator[dict[str, Any]]:
    """The rows of `path` (see `iter_rows`)."""
    for _, row in iter_rows(path):
        yield row


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, line


def _count_jsonl(file: Path) -> int:
    return sum(1 for _ in _lines(file))


def _iter_jsonl(file: Path) -> Iterator[tuple[str, Any]]:
    for number, line in _lines(file):
        where = f"{file}:{number}"
        yield where, lambda where=where, line=line: _parse_line(where, line)


def _parse_line(where: str, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: broken JSON ({error.msg} at column {error.colno}): {line.strip()[:80]}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: a row must be a JSON object, this is {type(row).__name__}")
    return row


def _count_parquet(file: Path) -> int:
    import pyarrow.parquet as pq

    return pq.ParquetFile(file).metadata.num_rows


def _iter_parquet(file: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow.parquet as pq

    number = 0
    for batch in pq.ParquetFile(file).iter_batches():
        for row in batch.to_pylist():
            yield f"{file} row {number}", lambda row=row: row
            number += 1
