"""Values of short arithmetic expressions in sympy, without running model output as code.

sympy's own parser evaluates its input as Python. Here only a small alphabet and a few names get that far, the
generated code is checked node by node, and it runs without builtins.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from typing import Any

MAX_LENGTH = 300
MAX_UNKNOWN_LETTERS = 2
MAX_DIGITS = 400
MAX_EXPONENT = 1000

_ALPHABET = re.compile(r"[A-Za-z0-9+\-*/^().,!\s]*")
_KNOWN_WORDS = ("sqrt", "frac", "sin", "cos", "tan", "log", "ln", "exp", "pi", "inf")
_BLOCKED = ("^{", "^(", "**(", "**{")
_BLOCKED_PATTERN = re.compile(r"(\^|\*\*)[0-9]+(\^|\*\*)|(\^|\*\*)\d{3,}|\d!{2,}|\d{4,}!")
_CODE_NODES = (
    ast.Expression, ast.Call, ast.Name, ast.Load, ast.Constant, ast.BinOp, ast.UnaryOp,
    ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.USub, ast.UAdd,
)  # fmt: skip


def count_unknown_letters_in_expr(expr: str) -> int:
    """Number of different letters outside known function names."""
    for word in _KNOWN_WORDS:
        expr = expr.replace(word, "")
    return len({char for char in expr if char.isalpha()})


def should_allow_eval(expr: str) -> bool:
    """Whether an expression is plain and small enough to hand to sympy."""
    if len(expr) > MAX_LENGTH or _ALPHABET.fullmatch(expr) is None:
        return False
    if re.search(r"\.\s*[A-Za-z(]|[A-Za-z)]\s*\.", expr) or re.search(rf"\d{{{MAX_DIGITS},}}", expr):
        return False  # a dot stands in numbers only: no attributes
    if count_unknown_letters_in_expr(expr) > MAX_UNKNOWN_LETTERS:
        return False
    return not any(part in expr for part in _BLOCKED) and _BLOCKED_PATTERN.search(expr) is None


def are_equal_under_sympy(ground_truth_normalized: str, given_normalized: str) -> bool:
    """Whether the difference of both simplifies to zero; False when it can't be parsed."""
    difference = f"({ground_truth_normalized})-({given_normalized})"
    if not should_allow_eval(difference):
        return False
    value = _evaluate(difference)
    if value is None:
        return False
    import sympy

    return bool(sympy.simplify(value) == 0)


def _evaluate(expr: str) -> Any | None:
    from sympy.parsing.sympy_parser import TokenError, stringify_expr

    names, transformations = _parser()
    try:
        code = stringify_expr(expr, {}, names, transformations)
        tree = ast.parse(code, mode="eval")
    except (SyntaxError, TokenError, ValueError, TypeError, IndexError):
        return None  # not an expression
    if not all(_harmless(node, names) for node in ast.walk(tree)):
        return None
    try:
        # every node of the tree is known to be harmless
        return eval(compile(tree, "<answer>", "eval"), {"__builtins__": {}}, dict(names))
    except (TypeError, ValueError, ZeroDivisionError, AttributeError):
        return None  # an expression without a value, such as 1(2)


def _harmless(node: ast.AST, names: dict[str, Any]) -> bool:
    if isinstance(node, ast.Name):
        return node.id in names
    if isinstance(node, ast.Call):
        return isinstance(node.func, (ast.Name, ast.Call)) and not node.keywords
    return isinstance(node, _CODE_NODES)


@cache
def _parser() -> tuple[dict[str, Any], tuple[Any, ...]]:
    import sympy
    from sympy.parsing import sympy_parser

    constructors = ("Symbol", "Integer", "Float", "Rational", "Function")
    functions = ("factorial", "sqrt", "sin", "cos", "tan", "log", "exp")
    table = {name: getattr(sympy, name) for name in constructors + functions}
    table |= {"pi": sympy.pi, "ln": sympy.log, "inf": sympy.oo}
    steps = (*sympy_parser.standard_transformations, sympy_parser.implicit_multiplication_application)
    return table, (*steps, sympy_parser.convert_xor)
