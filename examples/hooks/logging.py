"""Metrics of one's own. Returning True replaces the default metrics, False adds to them."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from slime.observability import logging_utils
from slime.utils.types import Sample


def log_rollout(
    rollout_id: int,
    args: Namespace,
    samples: list[Sample],
    rollout_extra_metrics: Mapping[str, Any] | None,
    rollout_time: float,
) -> bool:
    """Log the share of responses that say "because"."""
    share = sum("because" in sample.response for sample in samples) / len(samples)
    logging_utils.log(args, {"rollout/because": share, "rollout/step": rollout_id}, step_key="rollout/step")
    return False


def log_evaluation(
    rollout_id: int, args: Namespace, data: Mapping[str, Mapping[str, Any]], extra_metrics: Mapping[str, Any] | None
) -> bool:
    """Log the worst reward of each evaluation data set."""
    worst = {f"eval/{name}-worst": min(result["rewards"]) for name, result in data.items()}
    logging_utils.log(args, {**worst, "eval/step": rollout_id}, step_key="eval/step")
    return False
