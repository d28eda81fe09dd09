"""Advantages and losses. All tensors hold the response tokens that this context-parallel rank has."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch

TOKENS_PER_RESPONSE = 1000


def reward_at_every_token(args: Namespace, rollout_data: dict[str, Any]) -> None:
    """Set `advantages` and `returns`, per sample, as long as `kl`, which is there already."""
    advantages = [
        torch.full_like(kl, float(reward))
        for kl, reward in zip(rollout_data["kl"], rollout_data["rewards"], strict=True)
    ]
    rollout_data["advantages"] = rollout_data["returns"] = advantages


def reinforce(
    args: Namespace,
    batch: dict[str, Any],
    logits: torch.Tensor,
    sum_of_sample_mean: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Plain REINFORCE: - A_t log pi(token_t), without ratio or clipping. Use with --loss-type custom_loss."""
    from slime.backends.megatron_utils.loss import get_log_probs_and_entropy

    _, result = get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
    )
    log_probs, advantages = torch.cat(result["log_probs"]), torch.cat(batch["advantages"])
    loss = sum_of_sample_mean(-advantages * log_probs)
    return loss, {"loss": loss.detach()}


def mask_outliers(
    args: Namespace,
    *,
    pg_loss: torch.Tensor,
    train_log_probs: list[torch.Tensor],
    rollout_log_probs: list[torch.Tensor],
    loss_masks: list[torch.Tensor],
    total_lengths: list[int],
    response_lengths: list[int],
    **kwargs: Any,
) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
    """Drop tokens whose probability differs more than --tis-clip fold between trainer and engine."""
    ratio = (torch.cat(train_log_probs) - torch.cat(rollout_log_probs)).exp()
    outside = (ratio > args.tis_clip) | (ratio < 1 / args.tis_clip)
    return pg_loss.masked_fill(outside, 0.0), loss_masks, {"outliers": outside.float()}


def constant_length_mean(
    total_lengths: list[int],
    response_lengths: list[int],
    loss_masks: list[torch.Tensor],
    calculate_per_token_loss: bool,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Divide by one constant instead of each response's own length (Dr. GRPO, arXiv:2503.20783)."""
    mask = torch.cat([each.float() for each in loss_masks])
    return lambda values: (values * mask).sum() / TOKENS_PER_RESPONSE
