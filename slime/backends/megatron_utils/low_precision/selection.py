"""Lists of modules in a `quantization_config`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable


def selects(entries: Iterable[str]) -> Callable[[str], bool]:
    """Whether a module, given by its path, is in a list.

    An entry is a path, a run of a path's parts (`mlp.gate` is in `model.layers.3.mlp.gate`, but not in
    `model.layers.3.mlp.gate_proj`), or `re:` and a regular expression that matches the path from its start.
    """
    runs, expressions = [], []
    for entry in entries:
        if entry.startswith("re:"):
            expressions.append(re.compile(entry.removeprefix("re:")))
        else:
            runs.append(f".{entry}.")

    def selected(module: str) -> bool:
        dotted = f".{module}."
        return any(run in dotted for run in runs) or any(expression.match(module) for expression in expressions)

    return selected
