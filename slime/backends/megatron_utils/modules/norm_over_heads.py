"""RMSNorm over the queries, or the keys, of all heads together (MiniMax-M2), whose heads tensor parallelism spreads.

Every rank holds the whole weight and uses the part of its heads: megatron-core adds up the gradients of `q_layernorm`
and `k_layernorm` over the tensor-parallel ranks (`finalize_model_grads`, 0.16.1).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime.utils.accelerator import current


class NormOverHeads(torch.nn.Module):
    """x / sqrt(mean(x²) + eps) · weight over `heads` heads of `hidden_size` elements each.

    Drop-in for the per-head norms of `SelfAttention`.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, heads: int, eps: float = 1e-5) -> None:
        super().__init__()
        if not config.qk_layernorm:
            raise ValueError("norms over all heads need --qk-layernorm, by which Megatron adds up their gradients")
        self.heads, self.eps = heads, eps
        self.weight = torch.nn.Parameter(
            torch.ones(heads * hidden_size, dtype=config.params_dtype, device=current().device())
        )

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, heads of this rank, d] → the same."""
        group = parallel_state.get_tensor_model_parallel_group()
        local, total = x.shape[-2], self.heads
        squares = x.float().square().sum((-1, -2), keepdim=True)
        # summed forwards and backwards: each rank's heads depend on the squares of all
        squares = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(squares, group), group)
        # with fewer key heads than ranks, several ranks hold and count the same head
        copies = local * group.size() // total
        normed = x * torch.rsqrt(squares / (copies * total * x.shape[-1]) + self.eps).to(x.dtype)
        first = group.rank() * total // group.size()
        return self.weight.view(total, -1)[first : first + local] * normed


def norm_over_heads_spec(heads: int) -> Any:
    """What stands for `q_layernorm` or `k_layernorm` in an attention's spec."""
    from megatron.core.transformer.spec_utils import ModuleSpec

    return ModuleSpec(module=NormOverHeads, params={"heads": heads})
