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
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    cut = entry.cut
    if cut.expert:
        replica = ps.get_expert_data_parallel_rank()
    else:
        replica = ps.get_data_parallel_rank(with_context_parallel=True)
    key, replica_id = f"{ADAPTERS}.{entry.name}", (0, cut.rank if entry.dim is None else 0, replica)
    if entry.dim is None or len(entry.sections) == 1:
        return _tensor(entry, key, entry.parameter, replica_id)

    def sections(key: str, tensor: torch.Tensor, replica_id: Any, flattened_range: slice | None) -> list[Any]:
        assert flattened_range is None, "optimizer states of adapters are saved with their whole shapes"
        parts = tensor.split(entry.sections, dim=entry.dim)
        return [_tensor(entry, f"{key}.{index}", part, replica_id) for index, part in enumerate(parts)]

    return ShardedTensorFactory(
        key, entry.parameter, sections, lambda parts: torch.cat(parts, dim=entry.dim), replica_id
    )


def _tensor(entry: AdapterParameter, key: str, tensor: torch.Tensor, replica_id: tuple[int, int, int]) -> Any:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    offsets = [] if entry.dim is None else [(entry.dim, entry.cut.rank, entry.cut.size)]
    return ShardedTensor.from_rank_offsets(key, tensor, *offsets, replica_id=replica_id)


def has_adapters(model: Sequence[torch.nn.Module]) -> bool:
    return bool(adapters_of(model))
