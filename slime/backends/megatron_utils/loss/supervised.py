"""Losses against fixed targets: supervised fine-tuning and the critic's values."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch

from .log_probs import get_values, response_log_probs
from .reducers import metric_reducer


def sft_loss_function(
    args: Namespace,
    batch: dict[str, Any],
    logits: torch.Tensor,
    sum_of_sample_mean: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Negative log-likelihood of the unmasked response tokens, in nats.

    Args:
        batch: unconcat_tokens, total_lengths, response_lengths.
        logits: [1, packed tokens, vocabulary / tensor-parallel size].
        sum_of_sample_mean: see `get_sum_of_sample_mean`.
    """
    log_probs, _, _ = response_log_probs(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        with_entropy=False,
    )
    loss = -sum_of_sample_mean(log_probs)
    return loss, {"loss": loss.detach().clone()}


def value_loss_function(
    args: Namespace,
    batch: dict[str, Any],
    logits: torch.Tensor,
    sum_of_sample_mean: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Clipped squared error of the critic: mean of max((v_clip - R)^2, (v - R)^2), without a factor 1/2.

    v_clip = v_old + clamp(v - v_old, -args.value_clip, args.value_clip). Source: Schulman et al.'s PPO reference code
    (openai/baselines, ppo2).

    Args:
        batch: also loss_masks, and values (v_old) and returns, per sample, local response tokens.
        logits: [1, packed tokens, 1].
    """
    _, result = get_values(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
    )
    values, old_values, returns = (torch.cat(x) for x in (result["values"], batch["values"], batch["returns"]))
    change = values - old_values
    clipped = old_values + change.clamp(-args.value_clip, args.value_clip)
    loss = sum_of_sample_mean(torch.maximum((clipped - returns).square(), (values - returns).square()))
    clipfrac = metric_reducer(args, batch)((change.abs() > args.value_clip).float())
    return loss, {"value_loss": loss.detach().clone(), "value_clipfrac": clipfrac.detach()}
