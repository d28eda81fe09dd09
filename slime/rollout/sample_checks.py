"""The one place where it is checked that samples can be trained on."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

from slime.utils.types import Sample


def check_samples(args: Any, samples: list[Sample]) -> None:
    """Raise ValueError, naming sample and hook, unless every sample can be trained on.

    Each must have tokens = prompt + response, per-token fields as long as its response, and a finite number as
    reward; an aborted sample may be there only when it was removed from the loss with a reward set.
    """
    if not samples:
        raise ValueError("the rollout returned no samples")
    for sample in samples:
        try:
            sample.check_lengths()
        except ValueError as error:
            raise ValueError(f"{error}; made by {generate_hook(args, sample)}") from error
        if not sample.tokens:
            raise ValueError(f"{sample.name()} has no tokens; made by {generate_hook(args, sample)}")
        if sample.rollout_log_probs is not None:
            _check_finite(args, sample, "rollout_log_probs", sample.rollout_log_probs)
        check_reward(args, sample, sample.reward, args.reward_key)


def check_reward(args: Any, sample: Sample, reward: Any, key: str | None) -> Any:
    """The reward as plain Python value: a finite number, or a dict with a finite number under `key`.

    Where a custom post-processing makes the numbers, the reward may be anything but None.

    Raises:
        ValueError: it is None, NaN, infinite, not a number, or a dict without the key; names sample and hook.
    """
    if reward is not None and getattr(args, "custom_reward_post_process_path", None):
        return reward
    value, where = reward, "reward"
    if isinstance(reward, dict):
        if not key:
            raise ValueError(
                f"{sample.name()}: {reward_hook(args, sample)} gave a dict with keys {sorted(reward)}; "
                "set --reward-key to the one to train on"
            )
        if key not in reward:
            raise ValueError(
                f"{sample.name()}: {reward_hook(args, sample)} gave a dict with keys {sorted(reward)}, "
                f"none of them is {key!r} (--reward-key)"
            )
        value, where = reward[key], f"reward[{key!r}]"
    is_scalar_array = hasattr(value, "item") and math.prod(getattr(value, "shape", ())) == 1
    number = value.item() if is_scalar_array else value
    if not isinstance(number, numbers.Real) or not math.isfinite(number):
        hint = " (the sample was aborted)" if sample.status is Sample.Status.ABORTED else ""
        raise ValueError(
            f"{sample.name()}: {where} from {reward_hook(args, sample)} is {value!r}, not a finite number{hint}"
        )
    return reward | {key: number} if isinstance(reward, dict) else number


def reward_hook(args: Any, sample: Sample) -> str:
    """Name of what makes the sample's reward, for messages."""
    path = sample.custom_rm_path or getattr(args, "custom_rm_path", None)
    return path or f"rm type {sample.metadata.get('rm_type') or getattr(args, 'rm_type', None)!r}"


def generate_hook(args: Any, sample: Sample) -> str:
    """Name of what makes the sample's tokens, for messages."""
    custom = sample.generate_function_path or getattr(args, "custom_generate_function_path", None)
    return custom or getattr(args, "rollout_function_path", None) or "the rollout function"


def _check_finite(args: Any, sample: Sample, name: str, values: Sequence[float]) -> None:
    for position, value in enumerate(values):
        if not math.isfinite(value):
            raise ValueError(
                f"{sample.name()}: {name}[{position}] is {value}, not finite; made by {generate_hook(args, sample)}"
            )
