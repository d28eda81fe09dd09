"""Rewards on their way to training: checked, and normalised within each group."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from slime.rollout.hook_errors import hook_errors
from slime.utils.misc import group_by, load_function
from slime.utils.types import Sample

GROUP_CENTRED = ("grpo", "gspo", "cispo", "rloo", "reinforce_plus_plus_baseline")
GROUP_SCALED = ("grpo", "gspo", "cispo")
STD_EPSILON = 1e-6


def post_process_rewards(args: Any, samples: list[Sample]) -> tuple[list[float], list[float]]:
    """(raw rewards, rewards to train on), one per sample; `--custom-reward-post-process-path` replaces it.

    For the group-relative estimators each group (equal `group_index`, whatever its size) is centred on its mean and,
    with `args.grpo_std_normalization`, divided by its unbiased standard deviation + 1e-6 (DeepSeekMath,
    arXiv:2402.03300, eq. 1 ff.). RLOO subtracts the mean of the group's other rewards instead, which is the centred
    reward times n / (n - 1) (Ahmadian et al., arXiv:2402.14740 eq. 8).
    """
    if args.custom_reward_post_process_path:
        with hook_errors(args.custom_reward_post_process_path):
            raw, rewards = load_function(args.custom_reward_post_process_path)(args, samples)
        if not len(raw) == len(rewards) == len(samples):
            raise ValueError(
                f"{args.custom_reward_post_process_path} returned {len(raw)} raw rewards and {len(rewards)} rewards"
                f" for {len(samples)} samples"
            )
        return raw, rewards
    raw = [sample.get_reward_value(args) for sample in samples]
    if args.advantage_estimator not in GROUP_CENTRED or not args.rewards_normalization:
        return raw, list(raw)
    if args.advantage_estimator == "rloo":
        return raw, leave_one_out(raw, group_keys(args, samples), _trajectory_keys(samples))
    scale = args.grpo_std_normalization and args.advantage_estimator in GROUP_SCALED
    return raw, normalize_by_group(raw, group_keys(args, samples), _trajectory_keys(samples), scale)


def normalize_by_group(
    rewards: Sequence[float], groups: Sequence[Any], trajectories: Sequence[Any], scale: bool
) -> list[float]:
    """Centre rewards on their group's mean and optionally divide by its standard deviation + 1e-6.

    The samples of one trajectory (a rollout that fanned out) count once, with their mean reward. A group of one
    trajectory, or of equal rewards, gives 0.
    """
    normalized = [0.0] * len(rewards)
    for members in group_by(range(len(rewards)), lambda i: groups[i]).values():
        by_trajectory = group_by(members, lambda i: trajectories[i]).values()
        values = [math.fsum(rewards[i] for i in parts) / len(parts) for parts in by_trajectory]
        if len(values) == 1 or max(values) == min(values):
            continue
        mean = math.fsum(values) / len(values)
        divisor = statistics.stdev(values) + STD_EPSILON if scale else 1.0
        for i in members:
            normalized[i] = (rewards[i] - mean) / divisor
    return normalized


def leave_one_out(rewards: Sequence[float], groups: Sequence[Any], trajectories: Sequence[Any]) -> list[float]:
    """Rewards minus the mean reward of the group's other trajectories; 0 where there is no other.

    The samples of one trajectory count once, with their mean reward.
    """
    sizes = {
        group: len({trajectories[i] for i in members})
        for group, members in group_by(range(len(rewards)), lambda i: groups[i]).items()
    }
    centred = normalize_by_group(rewards, groups, trajectories, scale=False)
    return [x * size / max(size - 1, 1) for x, size in zip(centred, (sizes[group] for group in groups), strict=True)]


def group_keys(args: Any, samples: list[Sample]) -> list[int]:
    """The group of each sample: its `group_index`, or its row of n_samples_per_prompt where no sample has one.

    Raises:
        ValueError: only some samples have a group_index, or none has and the rows don't come out even.
    """
    missing = [sample for sample in samples if sample.group_index is None]
    if not missing:
        return [sample.group_index for sample in samples]  # type: ignore[misc]
    size = args.n_samples_per_prompt
    if len(missing) < len(samples) or len(samples) % size:
        raise ValueError(
            f"{missing[0].name()} has no group_index ({len(missing)} of {len(samples)} samples lack it):"
            " group normalisation needs it"
        )
    return [i // size for i in range(len(samples))]


def _trajectory_keys(samples: list[Sample]) -> list[Any]:
    return [("rollout", s.rollout_id) if s.rollout_id is not None else ("sample", i) for i, s in enumerate(samples)]
