"""Rollout functions: they replace generation as a whole."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.utils.types import Sample


def echo_rollout(args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False) -> RolloutFnTrainOutput:
    """Every prompt is its own answer. A smoke test of the trainer without engines."""
    groups = data_source.get_samples(args.rollout_batch_size)
    for group in groups:
        for position, sample in enumerate(group):
            sample.tokens = [1, 2, 3]
            sample.response_length = 2  # the last two of the three tokens
            sample.response = str(sample.prompt)
            sample.reward = float(position % 2)
            sample.status = Sample.Status.COMPLETED
    return RolloutFnTrainOutput(groups, metrics={"rollout/echoed": len(groups)})


def echo_evaluation(
    args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = True
) -> RolloutFnEvalOutput:
    """One result per evaluation data set; `samples` may be left out."""
    return RolloutFnEvalOutput({"constant": {"rewards": [0.0, 1.0], "truncated": [False, False]}})
