"""From samples to train data."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from slime.utils.types import Sample


def columns(args: Namespace, samples: list[Sample]) -> dict[str, list[Any]]:
    """The columns that training needs, one entry per sample. Replaces normalisation of rewards as well."""
    masks = [sample.loss_mask or [1] * sample.response_length for sample in samples]
    rewards = [float(sample.get_reward_value(args)) for sample in samples]
    return {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": rewards,
        "raw_reward": rewards,
        "truncated": [int(sample.status is Sample.Status.TRUNCATED) for sample in samples],
        "sample_indices": [sample.index for sample in samples],
        "rollout_ids": list(range(len(samples))),  # each sample is a rollout of its own
        "loss_masks": masks,
        "rollout_mask_sums": [float(sum(mask)) for mask in masks],
    }


def clamp_advantages(args: Namespace, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """Edit the data on every trainer, once advantages are there."""
    rollout_data["advantages"] = [advantage.clamp(-3, 3) for advantage in rollout_data["advantages"]]
