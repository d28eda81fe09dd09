"""The deepscaler grader: a maths answer that follows the reasoning; an answer without reasoning marker is wrong."""

from __future__ import annotations

from typing import Any

from slime.rollout.rm_hub.math_utils import extract_boxed_answer, is_correct

MARKERS = ("</think>", "###Response")


def answer_part(response: str) -> str | None:
    """The text behind the last reasoning marker; None without one."""
    for marker in MARKERS:
        if marker in response:
            return response.rsplit(marker, 1)[1]
    return None


def get_deepscaler_rule_based_reward(response: str, label: Any) -> int:
    """1 when the last \\boxed answer behind `</think>` or `###Response` equals the label, else 0."""
    part = answer_part(response)
    answer = extract_boxed_answer(part) if part is not None else None
    return int(answer is not None and is_correct(answer, label))
