"""Hugging Face tensors -> the weights that this rank holds."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from slime.backends.megatron_utils.families import (
    BoundWeight,
    Family,
    ModelShape,
    family_of_checkpoint,
    read_hf_config,
    shape_from_model,
)
from slime.backends.megatron_utils.families.table import EMBEDDING, OUTPUT_LAYER
from slime.backends.megatron_utils.hf_to_megatron.dequantizing_reader import open_weights
from slime.backends.megatron_utils.hf_to_megatron.in_place import fill_in_place
from slime.backends.megatron_utils.hf_to_megatron.reader import SafetensorReader
from slime.backends.megatron_utils.update_weight.common import (
    named_params_and_buffers,
    tensor_parallel_rank_and_size,
    unwrap_model,
)
from slime.backends.megatron_utils.value_head import has_value_head


@torch.no_grad()
def load_hf_weights(
    args: argparse.Namespace,
    model: Sequence[torch.nn.Module],
    path: str | Path,
    on_weight: Callable[[Tensor], None] | None = None,
) -> None:
    """Fill every weight of `model` (this rank's chunks) from the Hugging Face directory `path`.

    All ranks take part. Weights in low precision are dequantised. The optimizer's copies of the weights are the
    caller's to refresh. A critic's value head stays as it is. `on_weight` is called with each weight that is filled.

    Raises:
        KeyError: a weight that the model needs is missing.
        ValueError: a shape doesn't fit, or the directory holds weights that no rank of the model uses.
    """
    family, reader = family_of_checkpoint(path), open_weights(path)
    shape = shape_from_model(args, unwrap_model(model[0]).config)
    used: set[str] = set()
    if has_value_head(args):
        used.update(family.bind(OUTPUT_LAYER).hf_names)
    for name, parameter in named_params_and_buffers(args, model):
        if name == OUTPUT_LAYER and has_value_head(args):
            continue
        bound = _bind(family, name, shape, reader)
        used.update(bound.hf_names)
        try:
            _fill(args, parameter.data, bound, shape, reader)
        except ValueError as error:
            raise ValueError(f"{name}: {path}: {error}; Hugging Face tensors: {', '.join(bound.hf_names)}") from error
        if on_weight is not None:
            on_weight(parameter)
    _check_all_used(family, shape, reader, used)


def _bind(family: Family, name: str, shape: ModelShape, reader: SafetensorReader) -> BoundWeight:
    """The row of this weight; a tied output layer, or one whose matrix the directory leaves out, is the embedding."""
    if name == OUTPUT_LAYER:
        tied = shape.tied_embeddings or family.bind(OUTPUT_LAYER).hf_names[0] not in reader.names
        return family.bind(EMBEDDING if tied else OUTPUT_LAYER)
    return family.bind(name, shape.num_layers)


def _fill(
    args: argparse.Namespace, target: Tensor, bound: BoundWeight, shape: ModelShape, reader: SafetensorReader
) -> None:
    row = bound.expert if bound.row.stacked_experts else None
    parts = [reader.get_tensor(name) if row is None else reader.get_row(name, row) for name in bound.hf_names]
    layout, (rank, size) = bound.row.layout, tensor_parallel_rank_and_size(bound.is_expert)
    if size == 1 and fill_in_place(layout, parts, target, shape):
        return
    local = layout.shard(bound.to_megatron(parts, shape, padded_rows=args.padded_vocab_size), rank, size)
    if local.shape != target.shape:
        raise ValueError(f"gives the shape {tuple(local.shape)}, the model has {tuple(target.shape)}")
    target.copy_(local)


def _check_all_used(family: Family, shape: ModelShape, reader: SafetensorReader, used: set[str]) -> None:
    """Weights that nobody loads mean that the model is not the one in the directory: an error, not a drop."""
    used_by_rank: list[set[str]] = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(used_by_rank, used)
    leftover = set(reader.names).difference(*used_by_rank)
    if shape.tied_embeddings:
        leftover -= set(family.bind(OUTPUT_LAYER).hf_names)
    config = read_hf_config(reader.path)
    layers = (config.get("text_config") or config)["num_hidden_layers"]
    leftover = {name for name in leftover if not (family.is_unused(name) or family.is_kept(name, layers))}
    if leftover:
        shown = ", ".join(sorted(leftover)[:8])
        raise ValueError(f"{reader.path} holds {len(leftover)} weights that the model does not use: {shown}, ...")
