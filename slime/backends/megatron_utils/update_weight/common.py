"""Weights of this rank under names that are unique over the whole model."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# the child of a model chunk that holds its LoRA adapters (`lora.attach`); they are no weights of the base
ADAPTERS = "lora"

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_LOCAL_EXPERT = re.compile(r"(\.experts\.local_experts\.)(\d+)(\.)|(\.experts\.linear_fc[12]\.(?:weight|bias))(\d+)$")
# buffers that are weights of the model for the outside
_WEIGHT_BUFFERS = ("expert_bias",)


def strip_param_name_prefix(name: str) -> str:
    """The name without the `module.` prefixes of the wrappers around a model."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def unwrap_model(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside Megatron's wrappers (data parallel, 16 bit)."""
    while hasattr(model, "module"):
        model = model.module
    return model


def named_params_and_buffers(
    args: argparse.Namespace, model: Sequence[torch.nn.Module], convert_to_global_name: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Weights of this rank's model chunks as (name, tensor).

    Adapters (LoRA) are not among them: `lora.weights.named_adapters` has them.
    Global names (the default) count layers over all pipeline stages and experts over all expert-parallel ranks, so
    that they are unique over the model; the tensors are this rank's shards, not copies.
    """
    for index, wrapped in enumerate(model):
        chunk = unwrap_model(wrapped)
        buffers = ((name, buffer) for name, buffer in chunk.named_buffers() if name.endswith(_WEIGHT_BUFFERS))
        for name, tensor in (*chunk.named_parameters(), *buffers):
            if name.startswith(f"{ADAPTERS}."):
                continue
            yield (global_name(name, chunk) if convert_to_global_name else f"vp_stages.{index}.{name}"), tensor


def global_name(name: str, chunk: torch.nn.Module) -> str:
    """`name` inside one model chunk with its layer and expert numbers counted over the whole model."""
    layer = _LAYER.match(name)
    if layer:
        number = chunk.decoder.layers[int(layer.group(1))].layer_number - 1
        name = f"decoder.layers.{number}.{name[layer.end() :]}"
    return _LOCAL_EXPERT.sub(lambda match: _global_expert(match, chunk), name)


def _global_expert(match: re.Match[str], chunk: torch.nn.Module) -> str:
    from megatron.core import parallel_state

    per_rank = chunk.config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
    first = parallel_state.get_expert_model_parallel_rank() * per_rank
    before, number, after = (
        (match.group(1), match.group(2), match.group(3)) if match.group(1) else (match.group(4), match.group(5), "")
    )
    return f"{before}{first + int(number)}{after}"


def tensor_parallel_rank_and_size(is_expert: bool) -> tuple[int, int]:
    """This rank's place among the ranks that share a weight: expert-tensor-parallel for experts."""
    from megatron.core import parallel_state

    if is_expert:
        return (
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )
    return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()


def tensor_parallel_group(is_expert: bool) -> torch.distributed.ProcessGroup:
    from megatron.core import parallel_state

    if is_expert:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()
