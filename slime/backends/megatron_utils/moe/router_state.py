"""What an optimiser step leaves in the routers: losses to report, expert biases. Written for megatron-core 0.16.1."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from slime.utils.accelerator import current


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
    """Undo what Megatron's 16-bit wrapper does to expert biases, before anything copies them.

    Megatron does so in the first forward pass. A copy from before it would round to 16 bits, for good, whatever is
    saved in it later.
    """
    for bias in expert_biases(model):
        bias.data = bias.data.float()


def pop_router_losses(args: Namespace, num_microbatches: int) -> dict[str, float]:
    """The auxiliary losses of the step, before their coefficients: means over MoE layers, micro-batches and replicas.

    All ranks take part. Names are Megatron's: load_balancing_loss, z_loss.
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
    coefficient = args.moe_aux_loss_coeff
    balances = any(coefficient) if isinstance(coefficient, list) else bool(coefficient)
    kinds = args.moe_router_load_balancing_type
    names = (
        ["load_balancing_loss"] if balances and "aux_loss" in (kinds if isinstance(kinds, list) else [kinds]) else []
    )
    return [*names, "z_loss"] if args.moe_z_loss_coeff is not None else names
