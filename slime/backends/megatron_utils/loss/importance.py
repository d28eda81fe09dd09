"""Corrections for the difference between the policy that the trainer computes and the one that the engine sampled."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch

from slime.utils.misc import load_function

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


def correct_for_engine(
    args: Namespace, batch: dict[str, Any], pg_loss: torch.Tensor, own_old: torch.Tensor, lengths: list[int]
) -> TisResult:
    """Run the TIS function (`args.custom_tis_function_path`, by default truncation) on a micro-batch.

    With `args.get_mismatch_metrics` alone it runs for its metrics: loss and masks stay as they are.

    Args:
        pg_loss, own_old: flat over the local response tokens; the loss, and the trainer's log-probs before the step.
        lengths: local response tokens of each sample.

    Raises:
        ValueError: the batch has no log-probs of the engine, or the function returned masks of other shapes.
    """
    if not batch.get("rollout_log_probs"):
        raise ValueError("--use-tis and --get-mismatch-metrics need the engine's log-probs (rollout_log_probs)")
    path = args.custom_tis_function_path
    optional = {} if not batch.get("tis_weight_means") else {"tis_weight_means": batch["tis_weight_means"]}
    corrected, masks, metrics = (load_function(path) if path else vanilla_tis_function)(
        args,
        pg_loss=pg_loss,
        train_log_probs=list(own_old.split(lengths)),
        rollout_log_probs=batch["rollout_log_probs"],
        loss_masks=batch["loss_masks"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        **optional,
    )
    if [mask.shape for mask in masks] != [mask.shape for mask in batch["loss_masks"]]:
        raise ValueError(f"{path} must return one mask per sample over its whole response")
    if not (args.use_tis or args.use_rs):
        return pg_loss, batch["loss_masks"], metrics
    return corrected, masks, metrics
