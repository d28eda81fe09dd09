"""Data files as flags name them, `path@[a:b]`, and what must be in them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from slime.utils.row_stores import RowSlice, open_store

DEFAULT_TOOL_KEY = "tools"  # a column that most data do not have
PROBED_ROWS = 1000  # of a file too large to read whole before it is used
_SLICE = re.compile(r"^(?P<path>.+)@\[(?P<cut>[^\[\]]*)\]$", re.DOTALL)
_CUT = re.compile(r"^\s*(?P<start>-?\d+)?\s*:\s*(?P<stop>-?\d+)?\s*$")


def split_slice(path: str) -> tuple[Path, slice]:
    """Take `file@[a:b]` apart; a path with another `@` in it is just a path.

    >>> split_slice("data/a@b.jsonl@[-2:]")
    (PosixPath('data/a@b.jsonl'), slice(-2, None, None))

    Raises:
        ValueError: what stands in the brackets is no slice.
    """
    match = _SLICE.match(path)
    if match is None or Path(path).exists():
        return Path(path), slice(None)
    cut = _CUT.match(match["cut"])
    if cut is None:
        raise ValueError(f"{path}: [{match['cut']}] is no slice of rows; write [a:b] with whole numbers, as [10:-5]")
    start, stop = (int(cut[name]) if cut[name] is not None else None for name in ("start", "stop"))
    return Path(match["path"]), slice(start, stop)


def open_rows(path: str, columns: Collection[str] | None = None) -> RowSlice:
    """The rows of `path` or `path@[a:b]`, read when they are asked for.

    Raises:
        FileNotFoundError, ValueError: see `split_slice` and `open_store`.
    """
    file, wanted = split_slice(path)
    return RowSlice(open_store(file, columns), wanted)


def iter_rows(path: str) -> Iterator[dict[str, Any]]:
    """The rows of `path` in order. Only the rows of the slice are parsed.

    Raises:
        FileNotFoundError, ValueError: see `open_rows`; or a row can't be read, and the message names file and line.
    """
    rows = open_rows(path)
    for number in range(len(rows)):
        yield rows.row(number)


read_file = iter_rows


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

    Where the file itself names its columns they are checked; a jsonl file is read, and of one with more than
    `max_bytes` the first rows: the others are looked at when they are reached.

    Raises:
        ValueError, FileNotFoundError: see `open_rows` and `require_columns`; a row without a prompt is named.
    """
    rows = open_rows(path)
    if rows.store.columns is not None:
        require_columns(path, rows.store.columns if len(rows) else (), wanted)
        return
    whole = rows.store.nbytes <= max_bytes
    present: set[str] = set()
    without_prompt = None
    for number in range(len(rows) if whole else min(len(rows), PROBED_ROWS)):
        row = rows.row(number)
        present.update(row)
        if without_prompt is None and "prompt" in wanted and row.get(wanted["prompt"]) is None:
            without_prompt = number  # an error, but a wrong key is clearer once all keys are known
    require_columns(path, present, wanted)
    if without_prompt is not None:
        raise ValueError(f"{rows.where(without_prompt)} has no prompt under {wanted['prompt']!r}")
