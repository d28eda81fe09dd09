"""Rotary embeddings in few passes over memory: on a CPU the stock operation is as slow as a small matrix product.

`source_rules` puts `rotate_halves` in place of Megatron's for the common case.
"""

from __future__ import annotations

from typing import Any

import torch


def rotate_halves(t: torch.Tensor, freqs: torch.Tensor, mscale: float) -> torch.Tensor:
    """t * cos + (-t2, t1) * sin over the first `freqs.size(-1)` entries of the last dimension (Su et al. 2021).

    Args:
        t: [tokens, ..., d]; t1 and t2 are the two halves of what is rotated.
        freqs: [tokens, ..., rotated], angles, the same in both halves; broadcast over t's other dimensions.
        mscale: a factor on cosine and sine (YaRN).
    """
    half = freqs[..., : freqs.size(-1) // 2]
    cos, sin = ((f(half) * mscale).to(t.dtype) for f in (torch.cos, torch.sin))
    return _RotateHalves.apply(t, cos, sin)


class _RotateHalves(torch.autograd.Function):
    """A rotation: its gradient is the rotation by the opposite angle."""

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(t, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin), None, None


def _rotate(t: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    size = cos.size(-1)
    first, second = t[..., :size], t[..., size : 2 * size]
    out = torch.empty_like(t, memory_format=torch.contiguous_format)
    torch.mul(first, cos, out=out[..., :size]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., size : 2 * size]).addcmul_(first, sin)
    if t.size(-1) > 2 * size:
        out[..., 2 * size :] = t[..., 2 * size :]
    return out
