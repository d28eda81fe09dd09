"""Syntax trees of source files."""

from __future__ import annotations

import ast
from pathlib import Path

ATTEMPTS = 20


def syntax_tree(path: Path) -> ast.Module:
    """The file's syntax tree.

    CPython 3.11 counts the depth of the trees that it makes for all threads in one place, and raises SystemError
    where another thread (here: the one that starts the engine, and imports) has made one meanwhile.
    """
    source = path.read_text(encoding="utf-8")
    for _ in range(ATTEMPTS):
        try:
            return ast.parse(source)
        except SystemError as error:
            raced = error
    raise raced
