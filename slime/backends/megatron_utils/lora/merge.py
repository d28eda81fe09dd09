"""Base weights and adapters as one: what engines and exports get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from slime.backends.megatron_utils.lora.attach import adapters_of


class AdapterMerger:
    """Adds this rank's adapters to this rank's weights; without LoRA it adds nothing."""

    def __init__(self, model: Sequence[torch.nn.Module]) -> None:
        self._by_weight = {
            name: adapter for adapters in adapters_of(model) for name, adapter in adapters.by_weight.items()
        }

    @torch.no_grad()
    def merged(self, name: str, weight: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """W + alpha / rank · B A, summed in float32 and rounded once to the dtype of `weight`, which stays as it is.

        All ranks that share an expert take part, in the same order.

        Args:
            name: the weight's global name.
            weight: this rank's part of it, on the device of the adapters.
            tensors: this rank's A and B by name.
        """
        adapter = self._by_weight.get(name)
        return weight if adapter is None else (weight.float() + adapter.delta(tensors)).to(weight.dtype)
