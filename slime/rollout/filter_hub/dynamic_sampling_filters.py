"""Filters that drop groups whose rewards are all the same: they give no gradient under group normalisation."""

from __future__ import annotations

import math
import statistics
from typing import Any

from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.utils.types import Sample

MIN_STD = 1e-6


def check_reward_nonzero_std(args: Any, samples: list[Any], **kwargs: Any) -> DynamicFilterOutput:
    """Keep a group iff the standard deviation of its rewards is over 1e-6.

    Where a rollout fanned out into several samples, their mean counts once. The arithmetic is double precision: in
    float32, eight rewards of 0.1 have a deviation of 8e-9.
    """
    rewards = [_trajectory_reward(args, item) for item in samples]
    if len(rewards) > 1 and statistics.stdev(rewards) > MIN_STD:
        return DynamicFilterOutput(keep=True)
    return DynamicFilterOutput(keep=False, reason=f"zero_std_{round(rewards[0], 1)}" if rewards else "empty_group")


def check_reward_nonzero_std_with_fallback(args: Any, samples: list[Any], **kwargs: Any) -> DynamicFilterOutput:
    """`check_reward_nonzero_std`, but a dropped group still fills a batch that would otherwise stay short."""
    output = check_reward_nonzero_std(args, samples, **kwargs)
    output.keep_when_insufficient = True
    return output


def _trajectory_reward(args: Any, item: Sample | list[Any]) -> float:
    if isinstance(item, list):
        return math.fsum(_trajectory_reward(args, part) for part in item) / len(item)
    return float(item.get_reward_value(args))
