"""What an optimiser step leaves in the routers: losses to report, expert biases. Written for megatron-core 0.16.1."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from slime.utils.accelerator import current

_BALANCING_LOSSES = {"aux_loss": "load_balancing_loss", "seq_aux_loss": "seq_load_balancing_loss"}


class ExpertBiases:
    """The expert biases as they are now: Megatron moves them at the end of every backward pass, also of one whose
    step is then skipped."""

    def __init__(self, model: Sequence[torch.nn.Module]) -> None:
        self._saved = [(bias, bias.clone()) for bias in expert_biases(model)]

    @torch.no_grad()
    def restore(self) -> None:
        for bias, saved in self._saved:
            bias.copy_(saved)


def expert_biases(model: Sequence[torch.nn.Module]) -> Iterator[torch.Tensor]:
    """The bias of every router that has one."""
    for chunk in model:
        yield from (buffer for name, buffer in chunk.named_buffers() if name.endswith(".expert_bias"))


def keep_biases_in_float32(model: Sequence[torch.nn.Module]) -> None:
    """Undo what Megatron's 16-bit wrapper does to expert biases and to the counts that move them.

    Megatron itself takes the bias back in the first forward pass: a copy from before it would round to 16 bits, for
    good, whatever is saved in it later. It leaves the counts, which bfloat16 rounds from 257 tokens on.
    """
    for chunk in model:
        for name, buffer in chunk.named_buffers():
            if name.endswith((".expert_bias", ".local_tokens_per_expert")):
                buffer.data = buffer.data.float()


def pop_router_losses(args: Namespace, num_microbatches: int) -> dict[str, float]:
    """The auxiliary losses of the step, before their coefficients: means over MoE layers, micro-batches and replicas.

    All ranks take part. Names are Megatron's.
    """
    from megatron.core import parallel_state as mpu
    from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker, get_moe_layer_wise_logging_tracker

    names = router_loss_names(args)
    if not names:
        return {}
    tracker = get_moe_layer_wise_logging_tracker()
    none = torch.zeros(1)
    sums = [tracker[name]["values"].sum() if name in tracker else none.sum() for name in names]
    layers = [(tracker[name]["values"] != 0).sum() if name in tracker else none.sum() for name in names]
    first = mpu.get_data_parallel_rank(with_context_parallel=True) == 0 and mpu.get_tensor_model_parallel_rank() == 0
    values = torch.tensor([[float(x) for x in sums], [float(x) * first for x in layers]], dtype=torch.float64)
    values = values.to(current().device())
    dist.all_reduce(values)
    clear_aux_losses_tracker()
    totals, layer_counts = values.tolist()
    scale = num_microbatches * mpu.get_data_parallel_world_size()
    pairs = zip(names, totals, layer_counts, strict=True)
    return {name: total / (scale * max(count, 1.0)) for name, total, count in pairs}


def router_loss_names(args: Namespace) -> list[str]:
    """Those that the run has."""
    if args.num_experts is None:
        return []
    kinds, coefficients = as_list(args.moe_router_load_balancing_type), as_list(args.moe_aux_loss_coeff)
    used = [kind for kind, coefficient in zip(kinds, coefficients, strict=False) if coefficient]
    names = [name for kind, name in _BALANCING_LOSSES.items() if kind in used]
    return [*names, "z_loss"] if args.moe_z_loss_coeff is not None else names


def as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]
