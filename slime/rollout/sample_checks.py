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
        if len(sample.tokens) == sample.response_length:
            raise ValueError(
                f"{sample.name()}: tokens must be prompt and response, but response_length {sample.response_length} is"
                f" all of them; made by {generate_hook(args, sample)}"
            )
        if sample.rollout_log_probs is not None:
            _check_finite(args, sample, "rollout_log_probs", sample.rollout_log_probs)
        if sample.status is Sample.Status.PENDING:
            raise ValueError(f"{sample.name()}: the status is still pending; made by {generate_hook(args, sample)}")
        if getattr(args, "use_rollout_routing_replay", False):
            check_routed_experts(args, sample)
        if not args.custom_convert_samples_to_train_data_path:  # which does with rewards what it likes
            check_reward(args, sample, sample.reward, args.reward_key)


def check_routed_experts(args: Any, sample: Sample) -> None:
    """Raise ValueError, naming the sample, unless each token before a trained one has valid experts of the engine.

    Tokens behind the last trained one (a tool's last words) need none: the trainer's router chooses for them.
    """
    import torch

    made_by = f"made by {generate_hook(args, sample)}; --use-rollout-routing-replay needs them of every sample"
    experts = sample.rollout_routed_experts
    if experts is None:
        raise ValueError(f"{sample.name()} has no rollout_routed_experts, {made_by}")
    experts = torch.as_tensor(experts)
    wanted = (len(experts), args.num_layers, args.moe_router_topk)
    if tuple(experts.shape) != wanted:
        raise ValueError(
            f"{sample.name()}: rollout_routed_experts has shape {tuple(experts.shape)}, expected {wanted}, {made_by}"
        )
    mask = sample.loss_mask if sample.loss_mask is not None else [1] * sample.response_length
    trained = [i for i, kept in enumerate(mask) if kept and not sample.remove_sample]
    needed = len(sample.tokens) - sample.response_length + trained[-1] if trained else 0
    if not needed <= len(experts) <= len(sample.tokens):
        raise ValueError(
            f"{sample.name()}: rollout_routed_experts has {len(experts)} rows for {len(sample.tokens)} tokens, of "
            f"which {needed} lie before the last trained one, {made_by}"
        )
    if len(experts) and not 0 <= int(experts.min()) <= int(experts.max()) < args.num_experts:
        raise ValueError(
            f"{sample.name()}: rollout_routed_experts has ids from {int(experts.min())} to {int(experts.max())}, the "
            f"model has experts 0 to {args.num_experts - 1}, {made_by}"
        )


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


def custom_reward(args: Any, sample: Sample) -> str | None:
    """The user's function that makes the sample's reward; None for a rule."""
    return sample.custom_rm_path or getattr(args, "custom_rm_path", None)


def reward_hook(args: Any, sample: Sample) -> str:
    """Name of what makes the sample's reward, for messages."""
    rm_type = sample.metadata.get("rm_type") or getattr(args, "rm_type", None)
    return custom_reward(args, sample) or f"rm type {rm_type!r}"


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
