"""RMSNorm for Megatron layer specs on a CPU; the stock local norm can't mark its weight for sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig


class CpuRMSNorm(torch.nn.Module):
    """x / sqrt(mean(x²) + eps) · weight over the last dimension (Zhang & Sennrich 2019).

    With `config.layernorm_zero_centered_gamma` the factor is (1 + weight) and the weight starts at zero.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        initial = torch.zeros if self.zero_centered else torch.ones
        self.weight = torch.nn.Parameter(initial(hidden_size, dtype=config.params_dtype))
        # Megatron sums such gradients over the tensor-parallel group: each rank saw its part of the sequence.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = 1 + self.weight if self.zero_centered else self.weight
        return F.rms_norm(x, weight.shape, weight, self.eps)
