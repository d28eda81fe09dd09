"""What runs in continuous integration assert of their own training: --ci-test, --ci-{save,load}-grad-norm."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path

ZERO = 1e-8
GRAD_NORM_TOLERANCE = 0.01  # relative and absolute
Metrics = Mapping[str, float]


class CiCheckFailed(AssertionError):
    """A figure of a training step is not what it has to be."""


def check_steps(args: Namespace, rollout_id: int, history: Sequence[Metrics], role: str = "actor") -> None:
    """Check the metrics of a rollout's optimiser steps, and write or compare their gradient norms.

    With --ci-test, for the actor: the first step's policy is the one that made the log-probs, so its KL to it is 0; in
    the first rollout of a run it is also the reference; and trainer and engine agree on log-probs.

    Raises:
        CiCheckFailed: naming the metric, its value and what it should be.
    """
    if args.ci_test and role == "actor":
        _check_first_step(args, rollout_id, history[0])
    for step_id, metrics in enumerate(history):
        norm = metrics["train/grad_norm" if role == "actor" else f"train/{role}-grad_norm"]
        place = {"role": role, "rollout_id": rollout_id, "step_id": step_id}
        if args.ci_save_grad_norm is not None:
            path = Path(args.ci_save_grad_norm.format(**place))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(norm))
        if args.ci_load_grad_norm is not None:
            _compare_grad_norm(Path(args.ci_load_grad_norm.format(**place)), norm)


def _check_first_step(args: Namespace, rollout_id: int, metrics: Metrics) -> None:
    if not args.ci_disable_kl_checker:
        zero = []
        if not (args.keep_old_actor or args.use_rollout_logprobs):
            zero.append("train/ppo_kl")
        if rollout_id == 0:
            zero.append("train/kl_loss")
        for name in zero:
            if abs(metrics.get(name, 0.0)) > ZERO:
                raise CiCheckFailed(
                    f"rollout {rollout_id}, first step: {name} is {metrics[name]:g}, not 0 (--ci-test)"
                )
    name, limit = "train/train_rollout_logprob_abs_diff", args.ci_train_rollout_logprob_abs_diff_threshold
    if not metrics.get(name, 0.0) <= limit:  # also where it is nan
        raise CiCheckFailed(
            f"rollout {rollout_id}, first step: {name} is {metrics[name]:g}, above "
            f"--ci-train-rollout-logprob-abs-diff-threshold {limit:g}"
        )


def _compare_grad_norm(path: Path, norm: float) -> None:
    expected = json.loads(path.read_text())
    if not math.isclose(norm, expected, rel_tol=GRAD_NORM_TOLERANCE, abs_tol=GRAD_NORM_TOLERANCE):
        raise CiCheckFailed(f"gradient norm {norm:g} is not the {expected:g} of {path} (--ci-load-grad-norm, 1 %)")
