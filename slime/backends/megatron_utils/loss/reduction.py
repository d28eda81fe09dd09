"""From a micro-batch's loss to what Megatron back-propagates."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from slime.utils.misc import load_function

from .multi_token import multi_token_loss
from .policy import policy_loss_function
from .reducers import loss_reducer
from .supervised import sft_loss_function, value_loss_function

LossFunction = Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]


def select_loss_function(args: Namespace) -> LossFunction:
    """The loss that `args.loss_type` names.

    Raises:
        ValueError: there is none of that name.
    """
    match args.loss_type:
        case "policy_loss":
            return policy_loss_function
        case "value_loss":
            return value_loss_function
        case "sft_loss":
            return sft_loss_function
        case "custom_loss":
            return load_function(args.custom_loss_function_path)
    raise ValueError(f"unknown loss type {args.loss_type!r}")


def loss_function(
    args: Namespace,
    batch: dict[str, Any],
    num_microbatches: int,
    step_global_batch_size: int,
    logits: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """The loss of a micro-batch, scaled so that the step's gradient does not depend on the layout.

    Megatron divides the loss by the returned number and by `num_microbatches`, and averages gradients over data- and
    context-parallel ranks. Default: the loss is multiplied by num_microbatches * ranks / `step_global_batch_size`, so
    the gradient is that of sum_i (loss of rollout execution i, see `loss_reducer`) / executions in the step. With
    `args.calculate_per_token_loss` Megatron divides the summed gradients by the summed token counts instead; each
    context-parallel rank counts every token of its samples, hence the factor for their number.

    Args:
        batch: what the loss function reads, and `logits_ahead` where multi-token-prediction layers train: their loss
            times `args.mtp_loss_scaling_factor` is added, but not to the metric "loss".

    Returns:
        (scaled loss, 1 or the number of loss tokens, {"keys": names, "values": [samples or tokens, *metrics]})
    """
    num_tokens = torch.stack([mask.sum() for mask in batch["loss_masks"]]).sum().int()
    reducer = loss_reducer(args, batch)
    function = select_loss_function(args)
    if args.recompute_loss_function:
        loss, metrics = checkpoint(function, args, batch, logits, reducer, use_reentrant=False)
    else:
        loss, metrics = function(args, batch, logits, reducer)
    if batch.get("logits_ahead"):
        ahead, ahead_metrics = multi_token_loss(args, batch, batch["logits_ahead"])
        loss = loss + args.mtp_loss_scaling_factor * ahead
        metrics = metrics | ahead_metrics

    cp_size, dp_with_cp_size = _layout_sizes()
    if args.calculate_per_token_loss:
        scaled, normalizer, count = loss * cp_size, num_tokens, num_tokens.float()
    else:
        scaled = loss * (num_microbatches * dp_with_cp_size / step_global_batch_size)
        normalizer = torch.ones_like(num_tokens)
        count = torch.full_like(num_tokens, len(batch["loss_masks"])).float()
    values = torch.stack([count, *(value.detach().float() for value in metrics.values())])
    return scaled, normalizer, {"keys": list(metrics), "values": values}


def _layout_sizes() -> tuple[int, int]:
    """(context-parallel size, data- x context-parallel size)"""
    if not dist.is_initialized():
        return 1, 1
    from megatron.core import parallel_state as mpu

    return mpu.get_context_parallel_world_size(), mpu.get_data_parallel_world_size(with_context_parallel=True)
