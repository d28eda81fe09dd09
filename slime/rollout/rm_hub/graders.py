"""The rule graders by rm type. They run in worker processes (`grader_pool`), so heavy imports stay inside them.

A grader takes (response, label, metadata) and gives a number, or a dict where the type defines one. With the prefix
`boxed_` it is given the content of the response's last box, wrapped so that its own extraction finds it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from slime.rollout.rm_hub.boxed import extract_boxed_answer

Score = float | dict[str, Any]


@dataclass(frozen=True)
class Grader:
    """How one rm type scores.

    Attributes:
        load: imports what the type needs and gives the scoring function.
        wrap_boxed: text in which the type's own extraction finds a given answer.
        failed: the score when grading fails or takes too long: never better than a wrong answer's.
        needs_label: a sample without label is a mistake in the data, not a wrong answer.
    """

    load: Callable[[], Callable[[str, Any, dict[str, Any]], Score]]
    wrap_boxed: str = "{}"
    failed: Score = 0.0
    needs_label: bool = True


def grade(rm_type: str, boxed: bool, response: str, label: Any, metadata: dict[str, Any]) -> Score:
    """Score a response; `boxed` takes its last box as the answer, and none is wrong."""
    grader = GRADERS[rm_type]
    if boxed:
        answer = extract_boxed_answer(response)
        response = grader.wrap_boxed.replace("{}", answer) if answer is not None else ""
    return grader.load()(response, label, metadata)


@cache
def _math() -> Callable[..., Score]:
    from slime.rollout.rm_hub.math_utils import grade_answer_verl

    _import_sympy()
    return lambda response, label, metadata: int(grade_answer_verl(response, label))


@cache
def _deepscaler() -> Callable[..., Score]:
    from slime.rollout.rm_hub.deepscaler import get_deepscaler_rule_based_reward

    _import_sympy()
    return lambda response, label, metadata: get_deepscaler_rule_based_reward(response, label)


def _import_sympy() -> None:
    import sympy.parsing.sympy_parser  # noqa: F401  seconds on a busy machine: before the clock runs


@cache
def _dapo() -> Callable[..., Score]:
    from slime.rollout.rm_hub.math_dapo_utils import compute_score

    return lambda response, label, metadata: compute_score(response, label)


@cache
def _f1() -> Callable[..., Score]:
    from slime.rollout.rm_hub.f1 import f1_score

    return lambda response, label, metadata: f1_score(response, label)[0]


@cache
def _gpqa() -> Callable[..., Score]:
    from slime.rollout.rm_hub.gpqa import compute_gpqa_reward

    return compute_gpqa_reward


@cache
def _ifbench() -> Callable[..., Score]:
    from slime.rollout.rm_hub.ifbench import compute_ifbench_reward, instruction_checks

    instruction_checks()
    return compute_ifbench_reward


@cache
def _reasoning_gym() -> Callable[..., Score]:
    from slime.rollout.rm_hub.reasoning_gym_rm import load_library, score_response

    load_library()
    return score_response


@cache
def _math_verify() -> Callable[..., Score]:
    from math_verify import parse, verify

    def score(response: str, label: Any, metadata: dict[str, Any]) -> Score:
        # The worker's time limit holds; the library's own needs the main thread's alarm signal.
        gold_text = str(label) if "$" in str(label) or "\\" not in str(label) else f"${label}$"
        gold = parse(gold_text, parsing_timeout=None)
        given = parse(response.rsplit("</think>", 1)[-1], parsing_timeout=None)
        return float(verify(gold, given, timeout_seconds=None))

    return score


GRADERS: dict[str, Grader] = {
    "math": Grader(_math, wrap_boxed=r"\boxed{{}}"),
    "deepscaler": Grader(_deepscaler, wrap_boxed=r"</think>\boxed{{}}"),
    "dapo": Grader(_dapo, wrap_boxed="Answer: {}", failed={"score": -1.0, "acc": False, "pred": None}),
    "f1": Grader(_f1),
    "gpqa": Grader(_gpqa, needs_label=False),  # metadata.correct_letter may stand for it
    "ifbench": Grader(_ifbench, needs_label=False),  # the instructions stand in the metadata
    "reasoning_gym": Grader(_reasoning_gym, needs_label=False),
    "math_verify": Grader(_math_verify, wrap_boxed=r"\boxed{{}}"),
}
