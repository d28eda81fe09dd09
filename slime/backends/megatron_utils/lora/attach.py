"""Adapters beside the linear layers of a built model chunk, without touching its modules."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from slime.backends.megatron_utils.families import BoundWeight, family_of_checkpoint, shape_from_model
from slime.backends.megatron_utils.lora import targets
from slime.backends.megatron_utils.lora.adapter import (
    AdapterParameter,
    GroupedLinearAdapter,
    LinearAdapter,
    LowRankPair,
    fused_norm,
)
from slime.backends.megatron_utils.lora.parallel import Cut
from slime.backends.megatron_utils.update_weight.common import (
    ADAPTERS,
    global_name,
    tensor_parallel_rank_and_size,
    unwrap_model,
)


class LoraAdapters(torch.nn.Module):
    """All adapters of a model chunk, which holds them under the name `ADAPTERS`.

    Attributes:
        by_weight: the adapter of a base weight, by the weight's global name.
        matched: the targets that named a linear layer of the chunk.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_weight: dict[str, LinearAdapter] = {}
        self.matched: set[str] = set()

    def named(self) -> Iterator[AdapterParameter]:
        """Every trained matrix of this rank."""
        for module in self.modules():
            if isinstance(module, LowRankPair):
                yield from module.named()

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Nothing: whole weights are the base's. `lora.checkpoint` saves adapters."""
        return {}


def adapters_of(model: Sequence[torch.nn.Module]) -> list[LoraAdapters]:
    """The adapters of each model chunk; empty without LoRA."""
    found = [getattr(unwrap_model(chunk), ADAPTERS, None) for chunk in model]
    return [adapters for adapters in found if adapters is not None]


def attach_adapters(chunk: torch.nn.Module, args: argparse.Namespace) -> None:
    """Freeze the chunk and put an adapter beside each linear layer that `args.lora_targets` names.

    Raises:
        KeyError: the chunk has a weight that the model family's table doesn't know.
        ValueError: the rank can't be divided over the ranks of an expert.
    """
    adapters = LoraAdapters()
    found = _find_linears(chunk, args, adapters.matched)
    for parameter in chunk.parameters():
        parameter.requires_grad_(False)
    for path, weights in found.items():
        experts = [_linear_adapter(chunk, args, *weight) for weight in weights]
        adapters.by_weight.update(zip([weight[0] for weight in weights], experts, strict=True))
        grouped = weights[0][1] != f"{path}.weight"
        adapter = GroupedLinearAdapter(experts) if grouped else experts[0]
        adapters.add_module(path.replace(".", "/"), adapter)
        module = chunk.get_submodule(path)
        module.register_forward_hook(_add_output_of(adapter, _input_of(module, chunk.config)))
    setattr(chunk, ADAPTERS, adapters)
    if hasattr(chunk, "embedding"):
        chunk.embedding.register_forward_hook(_require_grad)


def check_targets(chunks: Sequence[torch.nn.Module], args: argparse.Namespace) -> None:
    """ValueError for a target that names nothing in the whole model, and for a rank that nothing would train on; all
    ranks take part."""
    found = {target for adapters in adapters_of(chunks) for target in adapters.matched}
    targets.check_all_match(args.lora_targets, found)


# global weight name, name in the chunk, the table's row, Hugging Face modules with None where there is no adapter
_Found = tuple[str, str, BoundWeight, list[str | None]]


def _find_linears(chunk: torch.nn.Module, args: argparse.Namespace, matched: set[str]) -> dict[str, list[_Found]]:
    """By the path of a linear layer, its weights (several where it holds several experts).

    Multi-token-prediction layers stay as they are: engines draft with them, the policy does not depend on them.
    """
    family = family_of_checkpoint(args.hf_checkpoint)
    found: dict[str, list[_Found]] = {}
    for name, _ in chunk.named_parameters():
        weight_name = global_name(name, chunk)
        bound = family.bind(weight_name, chunk.config.num_layers)
        path, _, attribute = name.rpartition(".")
        # other matrices, such as a convolution's, are no linear layer of their own
        if weight_name.startswith("mtp.") or not attribute.startswith("weight") or not targets.is_linear(bound):
            continue
        modules: list[str | None] = []
        for module in targets.hf_modules(bound):
            names = targets.matching_targets(module, bound, path.rpartition(".")[2], args.lora_targets)
            matched.update(names)
            modules.append(module if names else None)
        if any(modules):
            found.setdefault(path, []).append((weight_name, name, bound, modules))
    return found


def _linear_adapter(
    chunk: torch.nn.Module,
    args: argparse.Namespace,
    weight_name: str,
    name: str,
    bound: BoundWeight,
    modules: list[str | None],
) -> LinearAdapter:
    rank, size = tensor_parallel_rank_and_size(bound.is_expert)
    cut = Cut(
        column=bound.row.layout.tp_dim == 0,
        expert=bound.is_expert,
        sequence_parallel=chunk.config.sequence_parallel and size > 1,
        rank=rank,
        size=size,
    )
    shape = shape_from_model(args, chunk.config)
    weight = chunk.get_parameter(name)
    return LinearAdapter(
        modules, bound.row.layout, shape, weight, cut, rank=args.lora_rank, alpha=args.lora_alpha, seed=args.seed
    )


def _input_of(module: torch.nn.Module, config: Any) -> Callable[[Tensor], Tensor]:
    if not hasattr(module, "layer_norm_weight"):
        return lambda inputs: inputs
    zero_centered = config.layernorm_zero_centered_gamma
    return fused_norm(module, config.normalization, config.layernorm_epsilon, zero_centered)


def _add_output_of(adapter: torch.nn.Module, input_of: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """A forward hook for Megatron's linear modules: (inputs, tokens per expert if grouped) -> (output, bias)."""

    def add(module: torch.nn.Module, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor | None]) -> Any:
        base, bias = output
        return base + adapter(input_of(inputs[0]), *inputs[1:]).to(base.dtype), bias

    return add


def _require_grad(module: torch.nn.Module, inputs: Any, output: Tensor) -> None:
    """Recomputed layers only pass gradients on where their input asks for one; a frozen embedding's does not."""
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_()
