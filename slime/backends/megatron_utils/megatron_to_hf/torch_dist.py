"""Read the weights of a torch_dist checkpoint as Hugging Face tensors, without building the model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from slime.backends.megatron_utils.families import Family, ModelShape
from slime.backends.megatron_utils.families.table import EMBEDDING, OUTPUT_LAYER

NamedTensors = list[tuple[str, Tensor]]

# equal layers are stored as one tensor with a leading layer dimension, equal experts with an expert dimension after it
_STACKED_LAYERS = re.compile(r"^decoder\.layers\.(?!\d)")
_STACKED_EXPERTS = ".mlp.experts.experts."


def read_hf_tensors(
    iteration_directory: Path, family: Family, shape: ModelShape, max_bytes: int
) -> Iterator[NamedTensors]:
    """All weights, in chunks of about `max_bytes` (a stacked weight is never divided over two reads).

    Raises:
        ValueError: the directory holds no model weights.
        KeyError: a stored weight is not in the family's table.
    """
    import torch.distributed.checkpoint as dcp

    from slime.utils.accelerator import current

    current().prepare_megatron()
    import megatron.core.dist_checkpointing  # noqa: F401  (the stored metadata refers to its classes)

    stored = {
        name: entry
        for name, entry in dcp.FileSystemReader(str(iteration_directory)).read_metadata().state_dict_metadata.items()
        if name.startswith(("decoder.", "mtp.", EMBEDDING, OUTPUT_LAYER)) and hasattr(entry, "size")
    }
    if not stored:
        raise ValueError(f"{iteration_directory} holds no weights of a GPT model")
    chunk: NamedTensors = []
    for name, entry in sorted(stored.items()):
        if name == OUTPUT_LAYER and shape.tied_embeddings:
            continue
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        dcp.load({name: tensor}, storage_reader=dcp.FileSystemReader(str(iteration_directory)), no_dist=True)
        for megatron_name, weight in unstack(name, tensor):
            chunk.extend(family.bind(megatron_name, shape.num_layers).to_hf(weight, shape))
        if sum(part.numel() * part.element_size() for _, part in chunk) >= max_bytes:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def unstack(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The single weights, under their global Megatron names, of one stored tensor."""
    if not _STACKED_LAYERS.match(name):
        yield from _unstack_experts(name, tensor)
        return
    for layer, weight in enumerate(tensor):
        yield from _unstack_experts(_STACKED_LAYERS.sub(f"decoder.layers.{layer}.", name), weight)


def _unstack_experts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    if _STACKED_EXPERTS not in name:
        yield name, tensor
        return
    for expert, weight in enumerate(tensor):
        yield name.replace(_STACKED_EXPERTS, f".mlp.experts.local_experts.{expert}."), weight
