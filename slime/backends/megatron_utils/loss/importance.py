"""Corrections for the difference between the policy that the trainer computes and the one that the engine sampled."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch

TisResult = tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]


def _importance_weights(train_log_probs: list[torch.Tensor], rollout_log_probs: list[torch.Tensor]) -> torch.Tensor:
    return torch.exp(torch.cat(train_log_probs) - torch.cat(rollout_log_probs))


def vanilla_tis_function(
    args: Namespace,
    *,
    pg_loss: torch.Tensor,
    train_log_probs: list[torch.Tensor],
    rollout_log_probs: list[torch.Tensor],
    loss_masks: list[torch.Tensor],
    **kwargs: Any,
) -> TisResult:
    """Truncated importance sampling: weight each token by w = pi_train_old / pi_engine, clamped.

    L <- L * clamp(w, args.tis_clip_low, args.tis_clip). Source: F. Yao et al., "Your Efficient RL Framework Secretly
    Brings You Off-Policy RL Training" (2025), https://fengyao.notion.site/off-policy-rl.

    Args:
        pg_loss: flat over the local response tokens of all samples.
        train_log_probs, rollout_log_probs: per sample, local response tokens.
        loss_masks: per sample; returned unchanged.

    Returns:
        (loss, masks, token-shaped metrics: tis, tis_clipfrac, tis_abs = |w - 1|)
    """
    weights = _importance_weights(train_log_probs, rollout_log_probs)
    clamped = weights.clamp(args.tis_clip_low, args.tis_clip)
    metrics = {"tis": weights, "tis_clipfrac": (clamped != weights).float(), "tis_abs": (weights - 1).abs()}
    return pg_loss * clamped, loss_masks, metrics


def icepop_function(
    args: Namespace,
    *,
    pg_loss: torch.Tensor,
    train_log_probs: list[torch.Tensor],
    rollout_log_probs: list[torch.Tensor],
    loss_masks: list[torch.Tensor],
    **kwargs: Any,
) -> TisResult:
    """Like `vanilla_tis_function`, but a token whose weight leaves [tis_clip_low, tis_clip] gets weight 0.

    The denominators of the loss stay as they are: a rejected token counts as one with loss 0. Source: IcePop,
    Ling team, "Small Leak Can Sink a Great Ship" (2025).
    """
    weights = _importance_weights(train_log_probs, rollout_log_probs)
    inside = (weights >= args.tis_clip_low) & (weights <= args.tis_clip)
    kept = torch.where(inside, weights, 0.0)
    metrics = {"tis": weights, "tis_clipfrac": (~inside).float(), "tis_abs": (weights - 1).abs()}
    return pg_loss * kept, loss_masks, metrics
