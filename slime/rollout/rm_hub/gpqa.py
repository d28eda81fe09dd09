"""Multiple-choice answers: find the letter that a response settles on."""

from __future__ import annotations

import re
import string
from typing import Any

from slime.rollout.rm_hub.errors import UngradableRow

DEFAULT_LETTERS = "ABCDEFGH"
# A small letter counts where no word goes on behind it: "the answer is a prime" names no choice.
_CHOICE = r"([A-Z](?![A-Za-z'])|[a-z](?=\s*(?:[^\w\s'(]|$)))"
_LETTER = rf"[\s:*(\[{{$\\]*(?:(?:boxed|text|textbf)\{{)*\(?{_CHOICE}"
_PATTERNS = [
    re.compile(rf"(?i:(?:final\s+)?(?:answer|option|choice)\s*(?:is|:|=)\s*(?:option|choice)?){_LETTER}"),
    re.compile(rf"(?i:answer|option|choice){_LETTER}"),
    re.compile(r"\b([A-Z])\)?\s+(?i:is\s+(?:the\s+)?(?:correct|right|best))"),
    re.compile(r"\\boxed\{\s*(?:\\text\{)?\(?([A-Za-z])\)?\}?\s*\}"),
]
_STANDALONE = re.compile(r"(?<![A-Za-z'])([A-Z])(?![A-Za-z'])")


def compute_gpqa_reward(response: str, label: Any, metadata: dict[str, Any] | None = None) -> float:
    """1.0 when the response settles on the right choice, else 0.0.

    Args:
        response: only what follows the last `</think>` counts.
        label: letter, index, or text of the right choice.
        metadata: `choices` (list or letter → text), `valid_letters`, `correct_letter`.

    Raises:
        UngradableRow: label and metadata don't say which choice is right.
    """
    metadata = metadata or {}
    choices = _choices(metadata)
    letters = _valid_letters(metadata, choices)
    correct = _correct_letter(label, metadata, choices, letters)
    if correct is None and not _normalize(str(label if label is not None else "")):
        raise UngradableRow("rm type gpqa needs a label (--label-key) or metadata.correct_letter")
    text = str(response).rsplit("</think>", 1)[-1]
    found = _find_letter(text, letters)
    if found is not None and correct is not None:
        return float(found == correct)
    answer_text = choices.get(correct, "") if correct is not None else str(label if label is not None else "")
    normalized = _normalize(answer_text)
    return float(bool(normalized) and normalized in _normalize(text))


def _choices(metadata: dict[str, Any]) -> dict[str, str]:
    choices = metadata.get("choices") or {}
    if isinstance(choices, dict):
        return {str(letter).upper(): str(text) for letter, text in choices.items()}
    return {string.ascii_uppercase[i]: str(text) for i, text in enumerate(choices)}


def _valid_letters(metadata: dict[str, Any], choices: dict[str, str]) -> str:
    return "".join(metadata.get("valid_letters") or choices or DEFAULT_LETTERS).upper()


def _correct_letter(label: Any, metadata: dict[str, Any], choices: dict[str, str], letters: str) -> str | None:
    given = metadata.get("correct_letter")
    if given:
        return str(given).strip().upper()
    if isinstance(label, int) and not isinstance(label, bool):
        if not 0 <= label < len(letters):
            raise UngradableRow(f"rm type gpqa: label {label} is no index into the choices {letters}")
        return letters[label]
    text = str(label if label is not None else "").strip()
    if len(text) == 1 and text.upper() in letters:
        return text.upper()
    wanted = _normalize(text)
    return next((letter for letter, choice in choices.items() if wanted and _normalize(choice) == wanted), None)


def _find_letter(text: str, letters: str) -> str | None:
    """The last letter that a phrase such as "the answer is B" names, else the last capital that stands alone."""
    for pattern in [*_PATTERNS, _STANDALONE]:
        found = [match.upper() for match in pattern.findall(text) if match.upper() in letters]
        if found:
            return found[-1]
    return None


def _normalize(text: str) -> str:
    return " ".join(re.sub(r"[^a-z0-9.\-+]+", " ", text.lower()).split())
