"""What runs assert of themselves in continuous integration."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime.backends.megatron_utils.ci_checks import CiCheckFailed, check_steps


def arguments(**given: Any) -> Namespace:
    defaults = {
        "ci_test": True,
        "ci_disable_kl_checker": False,
        "ci_train_rollout_logprob_abs_diff_threshold": 0.1,
        "ci_save_grad_norm": None,
        "ci_load_grad_norm": None,
        "keep_old_actor": False,
        "use_rollout_logprobs": False,
    }
    return Namespace(**{**defaults, **given})


def step(**given: float) -> dict[str, float]:
    figures = {"ppo_kl": 0.0, "kl_loss": 0.0, "train_rollout_logprob_abs_diff": 0.01, "grad_norm": 2.0, **given}
    return {f"train/{name}": value for name, value in figures.items()}


@pytest.mark.parametrize(
    ("rollout", "bad", "part"),
    [
        (3, {"ppo_kl": 1e-4}, "train/ppo_kl is 0.0001, not 0"),
        (0, {"kl_loss": -1e-4}, "train/kl_loss is -0.0001, not 0"),
        (
            3,
            {"train_rollout_logprob_abs_diff": 0.2},
            "is 0.2, above --ci-train-rollout-logprob-abs-diff-threshold 0.1",
        ),
        (3, {"train_rollout_logprob_abs_diff": float("nan")}, "is nan, above"),
    ],
)
def test_a_wrong_first_step(rollout: int, bad: dict[str, float], part: str) -> None:
    with pytest.raises(CiCheckFailed, match=part):
        check_steps(arguments(), rollout, [step(**bad)])
    check_steps(arguments(ci_test=False), rollout, [step(**bad)])


def test_what_may_differ_from_zero() -> None:
    """The reference's KL after the first rollout, later steps of a rollout, and an older policy's log-probs."""
    check_steps(arguments(), 1, [step(kl_loss=0.5), step(ppo_kl=0.5)])
    check_steps(arguments(keep_old_actor=True), 0, [step(ppo_kl=0.5)])
    check_steps(arguments(use_rollout_logprobs=True), 0, [step(ppo_kl=0.5)])
    check_steps(arguments(ci_disable_kl_checker=True), 0, [step(ppo_kl=0.5, kl_loss=0.5)])


def test_gradient_norms_are_compared_with_an_earlier_run(tmp_path: Path) -> None:
    template = str(tmp_path / "norms" / "{role}-{rollout_id}-{step_id}.json")
    check_steps(arguments(ci_save_grad_norm=template), 5, [step(grad_norm=2.0), step(grad_norm=40.0)])
    assert (tmp_path / "norms" / "actor-5-1.json").read_text() == "40.0"
    later = arguments(ci_load_grad_norm=template)
    check_steps(later, 5, [step(grad_norm=2.01), step(grad_norm=40.3)])
    with pytest.raises(CiCheckFailed, match=r"gradient norm 41 is not the 40 of .*actor-5-1\.json"):
        check_steps(later, 5, [step(), step(grad_norm=41.0)])
    critic = {"train/critic-grad_norm": 3.0}
    check_steps(arguments(ci_save_grad_norm=template), 5, [critic], role="critic")
    assert (tmp_path / "norms" / "critic-5-0.json").exists()
