"""Which linear layers get an adapter."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from slime.backends.megatron_utils.families import BoundWeight
from slime.utils.accelerator import current
from slime.utils.arguments.groups.lora import ALL_LINEAR, EXPERTS


def hf_modules(bound: BoundWeight) -> list[str]:
    """The Hugging Face modules that a weight is made of."""
    return [name.removesuffix(".weight") for name in bound.hf_names]


def is_linear(bound: BoundWeight) -> bool:
    """Whether the weight is that of a linear layer which tensor-parallel ranks share: no norm, embedding or router."""
    is_weight = all(name.endswith(".weight") for name in bound.hf_names)
    return is_weight and bound.row.layout.tp_dim is not None and not bound.row.vocab_rows


def matching_targets(module: str, bound: BoundWeight, megatron_module: str, targets: Collection[str]) -> list[str]:
    """The targets that name a Hugging Face module: by its name, by the Megatron module that holds it, by kind."""
    names = {ALL_LINEAR, module.rpartition(".")[2], megatron_module}
    if bound.is_expert:
        names.add(EXPERTS)
    return [target for target in targets if target in names]


def check_all_match(targets: Sequence[str], found: Collection[str]) -> None:
    """ValueError for a target that names nothing on any rank, and where a rank has none; all ranks take part."""
    flags = [float(target in found) for target in targets]
    counts = torch.tensor([*flags, float(not found)]).to(current().device())
    torch.distributed.all_reduce(counts)
    *by_target, empty_ranks = counts.tolist()
    unmatched = [target for target, count in zip(targets, by_target, strict=True) if count == 0]
    if unmatched:
        raise ValueError(f"--lora-targets: the model has no linear layer called {', '.join(unmatched)}")
    if empty_ranks:
        raise ValueError(
            f"--lora-targets {' '.join(targets)}: {empty_ranks:.0f} ranks hold no such layer and would train nothing; "
            "name layers that every pipeline stage has"
        )
