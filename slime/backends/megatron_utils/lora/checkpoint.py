"""Adapters in Megatron's sharded checkpoints: one tensor per A and B under its name, whatever the layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from slime.backends.megatron_utils.lora.adapter import AdapterParameter
from slime.backends.megatron_utils.lora.attach import adapters_of
from slime.backends.megatron_utils.update_weight.common import ADAPTERS


def sharded_adapters(chunk: torch.nn.Module) -> dict[str, Any]:
    """What to save, or where to load what, of one model chunk; the tensors are the parameters themselves."""
    return {entry.name: _sharded(entry) for adapters in adapters_of([chunk]) for entry in adapters.named()}


@torch.no_grad()
def restore_adapters(chunk: torch.nn.Module, loaded: Mapping[str, torch.Tensor]) -> None:
    """Fill the chunk's adapters."""
    for adapters in adapters_of([chunk]):
        for entry in adapters.named():
            entry.parameter.data.copy_(loaded[entry.name])


def base_state_dict(chunk: torch.nn.Module, loaded: dict[str, Any]) -> dict[str, Any]:
    """`loaded`, whole weights, with the adapters that the chunk has: what `load_state_dict` takes."""
    own = {name: value for name, value in chunk.state_dict().items() if name.startswith(f"{ADAPTERS}.")}
    return {**loaded, **own}


def _sharded(entry: AdapterParameter) -> Any:
    from megatron.core import parallel_state as ps
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

    cut = entry.cut
    if cut.expert:
        replica = ps.get_expert_data_parallel_rank()
    else:
        replica = ps.get_data_parallel_rank(with_context_parallel=True)
    offsets = [] if entry.dim is None else [(entry.dim, cut.rank, cut.size)]
    copy_of_rank = cut.rank if entry.dim is None else 0
    tensor = ShardedTensor.from_rank_offsets(
        f"{ADAPTERS}.{entry.name}", entry.parameter, *offsets, replica_id=(0, copy_of_rank, replica)
    )
    return apply_swiglu_sharded_factory(tensor, ()) if entry.halves else tensor


def has_adapters(model: Sequence[torch.nn.Module]) -> bool:
    return bool(adapters_of(model))
