"""Maths answers: taking them out of a response, and equality in the manner of the MATH data set.

Two answers are equal when their normal forms are the same string (`mathd_normalize_answer`) or, part by part, when
sympy finds their difference to be zero (`grade_answer_sympy`). The parsing of model output is in `safe_sympy`.
"""

from __future__ import annotations

import re
from typing import Any

from slime.rollout.rm_hub.answer_normalize import mathd_normalize_answer, sympy_normalize
from slime.rollout.rm_hub.boxed import extract_boxed_answer, last_boxed_only_string, remove_boxed
from slime.rollout.rm_hub.safe_sympy import are_equal_under_sympy, count_unknown_letters_in_expr, should_allow_eval

__all__ = [
    "are_equal_under_sympy",
    "count_unknown_letters_in_expr",
    "extract_answer",
    "extract_boxed_answer",
    "grade_answer_mathd",
    "grade_answer_sympy",
    "grade_answer_verl",
    "is_correct",
    "last_boxed_only_string",
    "mathd_normalize_answer",
    "remove_boxed",
    "should_allow_eval",
    "split_tuple",
]

MAX_ANSWER_CHARACTERS = 4000  # what is longer is no answer to be worked out, only to be compared as it stands
_BRACKETS = {"(": ")", "[": "]"}
_FRACTION = re.compile(r"^\(?-?\(?\d+\)?/\(?-?\d+\)?\)?$")


def extract_answer(passage: str) -> str | None:
    """The content of the last \\boxed or \\fbox; None without one."""
    return extract_boxed_answer(passage)


def is_correct(answer: str, label: Any) -> bool:
    """Whether `answer` equals `label`, a text or number that may itself stand in a box. An empty label never does."""
    expected = str(label) if label is not None else ""
    if "\\boxed" in expected or "\\fbox" in expected:
        expected = extract_boxed_answer(expected) or ""
    if not expected.strip():
        return False
    if len(answer) > MAX_ANSWER_CHARACTERS:
        return answer.strip() == expected.strip()
    return grade_answer_mathd(answer, expected) or grade_answer_sympy(answer, expected)


def grade_answer_verl(solution_str: str, ground_truth: Any) -> bool:
    """Whether the last box of the whole response holds the right answer."""
    answer = extract_boxed_answer(solution_str) if solution_str else None
    return answer is not None and is_correct(answer, ground_truth)


def grade_answer_mathd(given_answer: str, ground_truth: str) -> bool:
    """Equality of the MATH normal forms."""
    return mathd_normalize_answer(ground_truth) == mathd_normalize_answer(given_answer)


def grade_answer_sympy(given_answer: str, ground_truth: str) -> bool:
    """Equality by value; tuples and intervals element by element, with the same brackets."""
    expected, given = sympy_normalize(ground_truth), sympy_normalize(given_answer)
    if not given or not expected:
        return False
    if expected == given:
        return True
    expected_parts, given_parts = split_tuple(expected), split_tuple(given)
    is_tuple = len(expected_parts) > 1
    if is_tuple and (expected[0], expected[-1]) != (given[0], given[-1]):
        return False
    if len(expected_parts) != len(given_parts):
        return False
    return all(_equal_part(e, g) for e, g in zip(expected_parts, given_parts, strict=True))


def split_tuple(expr: str) -> list[str]:
    """The elements of "(a, b)" or "[a, b]"; the expression itself when it isn't a tuple.

    >>> split_tuple("(1, (2, 3))")
    ['1', '(2, 3)']
    """
    expr = expr.strip()
    if len(expr) < 2 or _BRACKETS.get(expr[0]) is None or expr[-1] not in ")]":
        return [expr] if expr else []
    parts, depth, start = [], 0, 1
    for i, char in enumerate(expr[1:-1], start=1):
        depth += (char in "([{") - (char in ")]}")
        if depth < 0:
            return [expr]  # the outer brackets are not a pair: (a)(b)
        if char == "," and depth == 0:
            parts.append(expr[start:i].strip())
            start = i + 1
    parts.append(expr[start:-1].strip())
    return parts if len(parts) > 1 else [expr]


def _equal_part(expected: str, given: str) -> bool:
    if _FRACTION.match(expected) and _FRACTION.match(given):
        return expected == given  # a fraction is asked for in lowest terms
    if _as_int(expected) is not None and _as_int(given) is None:
        return False  # "2" is not answered by "1+1"
    return are_equal_under_sympy(expected, given)


def _as_int(text: str) -> int | None:
    value = text.replace(",", "")
    return int(float(value)) if re.fullmatch(r"-?\d{1,300}(\.0*)?", value) else None
