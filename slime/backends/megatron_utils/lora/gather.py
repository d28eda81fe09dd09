"""The adapters of all ranks, whole, on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from slime.backends.megatron_utils.lora.weights import adapter_parameters

_BROADCAST_BYTES = 256 * 2**20

# name, shape, dtype of a whole matrix
_Entry = tuple[str, torch.Size, torch.dtype]


@torch.no_grad()
def gather_adapters(
    model: Sequence[torch.nn.Module], tensors: Mapping[str, Tensor] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(name, whole A or B) of the whole model, the same on every rank; all ranks take part in every step.

    Args:
        tensors: what to take in place of the live parameters, by name: tensors of their shapes, such as gradients.
    """
    own: dict[str, Tensor] = {}
    for entry in adapter_parameters(model):
        shard = entry.parameter if tensors is None else tensors[entry.name]
        own[entry.name] = entry.gather(shard.detach())
    held: list[list[_Entry]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(held, [(name, tensor.shape, tensor.dtype) for name, tensor in own.items()])
    seen: set[str] = set()
    for rank, entries in enumerate(held):
        new = [entry for entry in entries if entry[0] not in seen]
        seen.update(name for name, *_ in new)
        for bucket in _buckets(new):
            yield from _broadcast(rank, bucket, own)


def _broadcast(rank: int, bucket: Sequence[_Entry], own: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    from slime.utils.accelerator import current

    if dist.get_rank() == rank:
        flat = torch.cat([own[name].reshape(-1) for name, *_ in bucket])
    else:
        count = sum(shape.numel() for _, shape, _ in bucket)
        flat = torch.empty(count, dtype=bucket[0][2], device=current().device())
    dist.broadcast(flat, src=rank)
    pieces = flat.split([shape.numel() for _, shape, _ in bucket])
    for (name, shape, _), piece in zip(bucket, pieces, strict=True):
        yield name, piece.view(shape)


def _buckets(entries: Sequence[_Entry]) -> Iterator[list[_Entry]]:
    bucket: list[_Entry] = []
    size = 0
    for entry in entries:
        added = entry[1].numel() * entry[2].itemsize
        if bucket and size + added > _BROADCAST_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(entry)
        size += added
    if bucket:
        yield bucket
