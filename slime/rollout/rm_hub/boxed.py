"""\\boxed{} and \\fbox{} in LaTeX text."""

from __future__ import annotations

import re

_COMMAND = re.compile(r"\\(?:boxed|fbox)\s*")


def last_boxed_only_string(string: str) -> str | None:
    """The last complete `\\boxed{…}`, `\\boxed …` or `\\fbox{…}`, command included; None without one."""
    for match in reversed(list(_COMMAND.finditer(string))):
        end = _content_end(string, match.end())
        if end is not None:
            return string[match.start() : end]
    return None


def remove_boxed(s: str) -> str | None:
    """The content of a string that is one box; None when it isn't.

    >>> remove_boxed(r"\\boxed{\\frac{1}{2}}")
    '\\\\frac{1}{2}'
    """
    match = _COMMAND.match(s)
    if match is None:
        return None
    content = s[match.end() :]
    return content[1:-1] if content.startswith("{") and content.endswith("}") else content or None


def extract_boxed_answer(solution: str) -> str | None:
    """The content of the last box; None without one."""
    box = last_boxed_only_string(solution)
    return remove_boxed(box) if box is not None else None


def _content_end(string: str, start: int) -> int | None:
    """Where the box's content ends: at the matching brace, or for `\\boxed 5` at the end of the word."""
    if start >= len(string):
        return None
    if string[start] != "{":
        word = re.compile(r"[^\s$]+").match(string, start)
        return word.end() if word else None
    depth = 0
    for i in range(start, len(string)):
        depth += (string[i] == "{") - (string[i] == "}")
        if depth == 0:
            return i + 1
    return None
