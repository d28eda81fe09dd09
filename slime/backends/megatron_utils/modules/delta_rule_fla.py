"""The gated delta rule on a GPU: the Triton kernels of flash-linear-attention. Written for version 0.6."""

from __future__ import annotations

from torch import Tensor

from slime.backends.megatron_utils.modules.delta_rule import DeltaRuleKernels


def fla_kernels() -> DeltaRuleKernels:
    """The kernels; ImportError says what to install."""
    try:
        from fla.modules.causal_conv1d.ops import causal_conv1d
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError as error:
        raise ImportError(
            "gated delta net layers on a GPU need flash-linear-attention (pip install flash-linear-attention); "
            "--qwen-gdn-backend torch runs without it, slowly"
        ) from error

    def conv(x: Tensor, weight: Tensor, cu_seqlens: Tensor) -> Tensor:
        out, _ = causal_conv1d(x.unsqueeze(0), weight=weight, activation="silu", cu_seqlens=cu_seqlens)
        return out.squeeze(0)

    def delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, cu_seqlens: Tensor) -> Tensor:
        batched = (x.unsqueeze(0).contiguous() for x in (q, k, v, decay, beta))
        out, _ = chunk_gated_delta_rule(*batched, use_qk_l2norm_in_kernel=True, cu_seqlens=cu_seqlens)
        return out.squeeze(0)

    return DeltaRuleKernels(conv, delta_rule)
