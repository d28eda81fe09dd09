"""How the token losses of a micro-batch become one number (see docs/losses.md)."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import torch

from slime.backends.megatron_utils.cp_utils import get_sum_of_sample_mean

Reducer = Callable[[torch.Tensor], torch.Tensor]


def loss_reducer(args: Namespace, batch: dict[str, Any], loss_masks: Sequence[torch.Tensor] | None = None) -> Reducer:
    """The reduction of losses, from [local response tokens of all samples] to a 0-d tensor.

    Each rollout execution contributes sum m x / d, where d is the number of its loss tokens, or always
    `args.constant_loss_denominator`; with `args.calculate_per_token_loss` it contributes sum m x.

    Args:
        batch: total_lengths, response_lengths, loss_masks and, unless every sample is an execution of its own,
            rollout_mask_sums.
        loss_masks: masks for the numerator in place of the batch's; the denominators stay those of the batch.
    """
    return _reducer(args, batch, loss_denominators(args, batch), loss_masks)


def loss_denominators(args: Namespace, batch: dict[str, Any]) -> Sequence[torch.Tensor] | torch.Tensor:
    """Per sample, what the sum over its loss tokens is divided by unless the loss is per token."""
    if args.constant_loss_denominator is None:
        return mask_sums(batch)
    return torch.tensor([float(args.constant_loss_denominator)] * len(batch["loss_masks"]))


def metric_reducer(args: Namespace, batch: dict[str, Any]) -> Reducer:
    """The same for metrics: means over loss tokens, also when the loss divides by a constant."""
    return _reducer(args, batch, mask_sums(batch), None)


def _reducer(
    args: Namespace,
    batch: dict[str, Any],
    denominators: Sequence[torch.Tensor] | torch.Tensor,
    loss_masks: Sequence[torch.Tensor] | None,
) -> Reducer:
    return get_sum_of_sample_mean(
        batch["total_lengths"],
        batch["response_lengths"],
        batch["loss_masks"] if loss_masks is None else loss_masks,
        denominators,
        args.calculate_per_token_loss,
    )


def mask_sums(batch: dict[str, Any]) -> Sequence[torch.Tensor] | torch.Tensor:
    """Per sample, the loss tokens of the rollout execution that it belongs to."""
    sums = batch.get("rollout_mask_sums")
    return [mask.sum() for mask in batch["loss_masks"]] if sums is None else sums
