"""Which groups and samples are trained."""

from __future__ import annotations

import logging
from argparse import Namespace
from typing import Any

from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.utils.types import Sample

logger = logging.getLogger(__name__)


def newest_first(
    args: Namespace, rollout_id: int | None, buffer: list[list[Sample]], num_samples: int
) -> list[list[Sample]]:
    """Take the groups that were given back last; what is returned must leave `buffer`."""
    taken = buffer[-num_samples:]
    del buffer[-num_samples:]
    return taken


def mixed_rewards(args: Namespace, group: list[Sample], **kwargs: Any) -> DynamicFilterOutput:
    """Keep a group whose rewards differ: one in which all are equal teaches GRPO nothing."""
    rewards = {sample.get_reward_value(args) for sample in group}
    return DynamicFilterOutput(keep=len(rewards) > 1, reason="equal_rewards")


def leave_out_truncated(args: Namespace, data: list[list[Sample]]) -> None:
    """Responses that hit the length limit count for their group's statistics, but not for the loss."""
    for group in data:
        for sample in group:
            sample.remove_sample = sample.status is Sample.Status.TRUNCATED


def count_all(args: Namespace, all_groups: list[list[Sample]], data_source: Any) -> None:
    """See every group that was generated, those that a filter dropped too."""
    logger.info("%d groups generated for %d that train", len(all_groups), args.rollout_batch_size)
