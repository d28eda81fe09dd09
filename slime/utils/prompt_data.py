"""What `--prompt-data` names: one data file, or several that are mixed by weight."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slime.utils.read_rows import split_slice

_WEIGHTED = re.compile(r"^(?P<path>.+):(?P<weight>\d+(\.\d*)?|\.\d+)$", re.DOTALL)


@dataclass(frozen=True)
class PromptFile:
    """A source of prompts.

    Attributes:
        name: in metrics and in `sample.metadata["source_name"]`.
        path: `file` or `file@[a:b]`.
        weight: its share of the prompts before they are made to sum to 1; None: in proportion to its rows.
    """

    name: str
    path: str
    weight: float | None = None


def parse_prompt_data(prompt_data: str | Sequence[str]) -> list[PromptFile]:
    """Take the words of `--prompt-data` apart: `file`, `file@[a:b]`, each with an optional `:weight`.

    >>> [(f.name, f.weight) for f in parse_prompt_data(["a.jsonl:0.7", "b.parquet@[:9]:0.3"])]
    [('a', 0.7), ('b', 0.3)]

    Raises:
        ValueError: only some have a weight, one is 0, or two would have the same name.
    """
    words = [prompt_data] if isinstance(prompt_data, str) else list(prompt_data)
    if not words:
        raise ValueError("no file is named")
    files = [_parse(word) for word in words]
    missing = [file.path for file in files if file.weight is None]
    if missing and len(missing) < len(files):
        raise ValueError(f"either every file has a weight or none; {missing[0]} has none (write {missing[0]}:0.5)")
    names = [file.name for file in files]
    for name in names:
        if names.count(name) > 1:
            paths = [file.path for file in files if file.name == name]
            raise ValueError(f"several files are called {name!r}, their metrics would mix: {paths}; rename one")
    return files


def _parse(word: str) -> PromptFile:
    match = None if Path(word).exists() else _WEIGHTED.match(word)
    path, weight = (word, None) if match is None else (match["path"], float(match["weight"]))
    if weight == 0:
        raise ValueError(f"{word}: a weight must be above 0; leave the file out")
    return PromptFile(split_slice(path)[0].stem, path, weight)
