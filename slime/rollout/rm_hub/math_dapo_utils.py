"""The DAPO grader: "Answer: …" compared in the normal form of Minerva (Lewkowycz et al., arXiv:2206.14858, app. D)."""

from __future__ import annotations

import re
from typing import Any

from slime.rollout.rm_hub.boxed import last_boxed_only_string, remove_boxed

TAIL_CHARACTERS = 300  # the answer stands at the end; a bound on what the patterns see
BOX_TAIL_CHARACTERS = 100
ANSWER_PATTERN = r"(?i)Answer\s*:\s*([^\n]+)"

_SUBSTITUTIONS = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), (r"\ ", ""), (" ", ""), ("mbox", "text"),
    (",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
)  # fmt: skip
_REMOVED = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points",
    "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students",
    "childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3",
    "\\text{\n}", "\\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', "\\dots",
)  # fmt: skip


def normalize_final_answer(final_answer: str) -> str:
    """Minerva's normal form: without words, units and LaTeX decoration; braces round fractions and roots."""
    text = final_answer.split("=")[-1]
    for before, after in _SUBSTITUTIONS:
        text = text.replace(before, after)
    for word in _REMOVED:
        text = text.replace(word, "")
    text = re.sub(r"(.*?)(\$)(.*?)(\$)(.*)", r"$\3$", text)
    for command in ("text", "textbf", "overline"):
        text = re.sub(rf"(\\{command}\{{)(.*?)(\}})", r"\2", text)
    text = re.sub(r"(\\boxed\{)(.*)(\})", r"\2", text)
    text = re.sub(r"(frac)([^{])(.)", r"frac{\2}{\3}", text)
    text = re.sub(r"(sqrt)([^{])", r"sqrt{\2}", text)
    text = text.replace("$", "")
    if text.replace(",", "").isdigit():
        text = text.replace(",", "")
    return text.strip()


def is_correct_minerva(
    solution_str: str, gt: str, gt_need_extract: bool = False, answer_pattern: str = ANSWER_PATTERN
) -> tuple[bool, str]:
    """(right, prediction) for the last match of `answer_pattern`; "[INVALID]" is predicted without one."""
    matches = re.findall(answer_pattern, solution_str)
    prediction = normalize_final_answer(matches[-1] if matches else "[INVALID]")
    if gt_need_extract:
        box = last_boxed_only_string(gt)
        gt = normalize_final_answer((remove_boxed(box) if box else None) or "")
    else:
        gt = normalize_final_answer(gt)
    return prediction == gt, prediction


def is_correct_strict_box(pred: str, gt: str, pause_tokens_index: list[int] | None = None) -> tuple[int, str | None]:
    """(1 or -1, prediction) for the content of the last box near the end, compared as it is written."""
    start = pause_tokens_index[-1] - BOX_TAIL_CHARACTERS if pause_tokens_index else -BOX_TAIL_CHARACTERS
    box = last_boxed_only_string(pred[start:])
    content = remove_boxed(box) if box is not None else None
    return (1 if content == gt else -1), content


def verify(
    solution_str: str, answer: str, strict_box_verify: bool = False, pause_tokens_index: list[int] | None = None
) -> tuple[bool, str | None]:
    """(right, prediction) by the box or by "Answer: …"."""
    if strict_box_verify:
        score, prediction = is_correct_strict_box(solution_str, answer, pause_tokens_index)
        return score == 1, prediction
    return is_correct_minerva(solution_str, answer)


def compute_score(
    solution_str: str,
    ground_truth: Any,
    strict_box_verify: bool = False,
    pause_tokens_index: list[int] | None = None,
) -> dict[str, Any]:
    """{"score": 1.0 or -1.0, "acc": right, "pred": prediction} for the end of a response."""
    tail = solution_str[-TAIL_CHARACTERS:]
    right, prediction = verify(tail, label_text(ground_truth), strict_box_verify, pause_tokens_index)
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": prediction}


def label_text(label: Any) -> str:
    """A label as DAPO writes it: whole numbers without decimals, anything else as it stands.

    >>> label_text("34.0"), label_text("1/2")
    ('34', '1/2')
    """
    text = str(label).strip()
    if re.fullmatch(r"-?\d{1,300}(\.0*)?", text):
        return str(int(text.split(".")[0]))
    return text
