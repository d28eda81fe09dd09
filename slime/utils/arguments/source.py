"""Reading class bodies of an installed package from its source, without importing it.

megatron-core and SGLang import torch and more, which takes seconds; names, types and defaults of their settings can
be read from their source files in milliseconds.
"""

from __future__ import annotations

import ast
import importlib.util
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple


class Unreadable(Exception):
    """The source isn't laid out as it was when this reader was written."""


class SourceField(NamedTuple):
    """One annotated class attribute: `name: annotation = value` and the text that documents it."""

    name: str
    annotation: ast.expr
    value: ast.expr | None
    doc: str


def package_folder(package: str) -> Path | None:
    """Where an installed top-level package's source lies, or None if it isn't installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def parse_file(path: Path) -> ast.Module:
    """The syntax tree of a source file.

    Raises:
        Unreadable: there is no such file.
    """
    if not path.is_file():
        raise Unreadable(f"{path} does not exist")
    return ast.parse(path.read_text(encoding="utf-8"))


def find_class(module: ast.Module, name: str, path: Path) -> ast.ClassDef:
    """The class `name` of a module.

    Raises:
        Unreadable: the module has no such class.
    """
    for node in module.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise Unreadable(f"{path} has no class {name}")


def class_fields(node: ast.ClassDef) -> Iterator[SourceField]:
    """The annotated attributes of a class in their order, each with the text right below it."""
    for position, statement in enumerate(node.body):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            below = node.body[position + 1] if position + 1 < len(node.body) else None
            yield SourceField(statement.target.id, statement.annotation, statement.value, _docstring(below))


def literal(node: ast.expr | None, names: dict[str, Any] | None = None) -> Any:
    """The value of an expression of literals, arithmetic on them, concatenation, and names in `names`.

    Raises:
        Unreadable: the expression has something else in it.
    """
    if node is None:
        return None
    known = names or {}
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name) and node.id in known:
        return known[node.id]
    if isinstance(node, ast.List):
        return [literal(item, known) for item in node.elts]
    if isinstance(node, ast.Tuple):
        return tuple(literal(item, known) for item in node.elts)
    if isinstance(node, ast.Dict) and all(key is not None for key in node.keys):
        return {literal(key, known): literal(value, known) for key, value in zip(node.keys, node.values, strict=True)}
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -literal(node.operand, known)
    if isinstance(node, ast.BinOp):
        return _binary(node, known)
    raise Unreadable(f"not a literal: {ast.unparse(node)}")


def _binary(node: ast.BinOp, known: dict[str, Any]) -> Any:
    left, right = literal(node.left, known), literal(node.right, known)
    if isinstance(node.op, ast.Add):
        return left + right
    if isinstance(node.op, ast.Mult):
        return left * right
    if isinstance(node.op, ast.Pow):
        return left**right
    raise Unreadable(f"not a literal: {ast.unparse(node)}")


def _docstring(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return " ".join(textwrap.dedent(node.value.value).split())
    return ""
