"""Read the weights of a torch_dist checkpoint as Hugging Face tensors, without building the model."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime.backends.megatron_utils.families import Family, ModelShape
from slime.backends.megatron_utils.families.table import EMBEDDING, OUTPUT_LAYER, ExpertStacks

NamedTensors = list[tuple[str, Tensor]]

# equal layers are stored as one tensor with a leading layer dimension, equal experts with an expert dimension after it
_STACKED_LAYERS = re.compile(r"^decoder\.layers\.(?!\d)")
_STACKED_EXPERTS = ".mlp.experts.experts."


def stored_weights(iteration_directory: Path) -> dict[str, Any]:
    """The model's weights among the stored tensors: torch's metadata of each, by name.

    Raises:
        ValueError: there are none.
    """
    import torch.distributed.checkpoint as dcp

    from slime.utils.accelerator import current

    current().prepare_megatron()
    import megatron.core.dist_checkpointing  # noqa: F401  (the stored metadata refers to its classes)

    metadata = dcp.FileSystemReader(str(iteration_directory)).read_metadata().state_dict_metadata
    stored = {
        name: entry
        for name, entry in metadata.items()
        if name.startswith(("decoder.", "mtp.", "visual.", EMBEDDING, OUTPUT_LAYER)) and hasattr(entry, "size")
    }
    if not stored:
        raise ValueError(f"{iteration_directory} holds no weights of a GPT model")
    return stored


def total_bytes(stored: Mapping[str, Any]) -> int:
    """Bytes of stored tensors, given by their metadata."""
    return sum(math.prod(entry.size) * entry.properties.dtype.itemsize for entry in stored.values())


def read_hf_tensors(
    iteration_directory: Path, family: Family, shape: ModelShape, max_bytes: int
) -> Iterator[NamedTensors]:
    """All weights, layer by layer, in chunks of about `max_bytes`; no more than a chunk and a weight is in memory.

    Raises:
        ValueError: the directory holds no model weights.
        KeyError: a stored weight is not in the family's table.
    """
    stored = stored_weights(iteration_directory)
    reader, stacks = _SliceReader(iteration_directory), ExpertStacks(shape.num_experts)
    chunk: NamedTensors = []
    size = 0
    for name, (stored_name, index) in sorted(single_weights(stored).items(), key=lambda item: _natural_order(item[0])):
        if name == OUTPUT_LAYER and shape.tied_embeddings:
            continue
        weight = reader.read(stored_name, stored[stored_name], index)
        bound = family.bind(name, shape.num_layers)
        parts = stacks.add(bound, bound.to_hf(weight, shape))
        chunk.extend(parts)
        size += sum(part.numel() * part.element_size() for _, part in parts)
        if size >= max_bytes:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
    stacks.check_complete()


def single_weights(stored: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Each weight's global Megatron name -> the stored tensor that holds it, and where in its leading dimensions."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, entry in stored.items():
        layers = range(entry.size[0]) if _STACKED_LAYERS.match(name) else [None]
        for layer in layers:
            single = name if layer is None else _STACKED_LAYERS.sub(f"decoder.layers.{layer}.", name)
            place = () if layer is None else (layer,)
            if _STACKED_EXPERTS not in name:
                found[single] = (name, place)
                continue
            for expert in range(entry.size[len(place)]):
                of_expert = single.replace(_STACKED_EXPERTS, f".mlp.experts.local_experts.{expert}.")
                found[of_expert] = (name, (*place, expert))
    return found


class _SliceReader:
    """Reads parts of stored tensors; each read opens only the files that hold the part."""

    def __init__(self, directory: Path) -> None:
        import torch.distributed.checkpoint as dcp

        self._reader = dcp.FileSystemReader(str(directory))
        self._reader.set_up_storage_reader(self._reader.read_metadata(), is_coordinator=True)

    def read(self, name: str, entry: Any, index: tuple[int, ...]) -> Tensor:
        """The part of a stored tensor at `index` in its leading dimensions."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
        from torch.distributed.checkpoint.planner import LoadPlan
        from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

        rest = entry.size[len(index) :]
        box = ChunkStorageMetadata(
            offsets=torch.Size([*index, *(0 for _ in rest)]), sizes=torch.Size([*(1 for _ in index), *rest])
        )
        part = torch.empty(box.sizes, dtype=entry.properties.dtype)
        items = create_read_items_for_chunk_list(name, entry, [box])
        self._reader.read_data(LoadPlan(items), _planner(part)).wait()
        return part.reshape(rest)


def _planner(target: Tensor) -> Any:
    """What tells torch's reader where in `target` each piece that it has read belongs."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.planner import ReadItem

    class IntoOneTensor(DefaultLoadPlanner):
        def resolve_tensor(self, read_item: ReadItem) -> Tensor:
            place = zip(read_item.dest_offsets, read_item.lengths, strict=True)
            return target[tuple(slice(offset, offset + length) for offset, length in place)]

        def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
            return

    return IntoOneTensor()


def _natural_order(name: str) -> tuple[object, ...]:
    return tuple(int(piece) if index % 2 else piece for index, piece in enumerate(re.split(r"(\d+)", name)))
