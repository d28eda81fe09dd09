"""Attention over a sequence that is split in zigzag chunks over the context-parallel group, by gathering K and V.

A sequence is cut into 2·cp chunks of equal length; rank r holds chunks r and 2·cp-1-r, one after the other.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F


class GatherChunks(torch.autograd.Function):
    """[t, ...] on each rank → [cp, t, ...]; backward adds up the ranks' gradients of this rank's part."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        local = local.contiguous()
        gathered = local.new_empty((group.size() * local.size(0), *local.shape[1:]))  # gloo joins along dim 0
        dist.all_gather_into_tensor(gathered, local, group=group)
        return gathered.unflatten(0, (group.size(), local.size(0)))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.flatten(0, 1).contiguous()
        local = grad.new_empty((grad.size(0) // ctx.group.size(), *grad.shape[1:]))
        dist.reduce_scatter_tensor(local, grad, group=ctx.group)
        return local, None


def in_sequence_order(gathered: torch.Tensor) -> torch.Tensor:
    """[cp, n, 2c, ...] of zigzag chunks → [n, 2·cp·c, ...] in the sequence's order."""
    half = gathered.size(2) // 2
    chunks = torch.cat([gathered[:, :, :half], gathered[:, :, half:].flip(0)])  # [2cp, n, c, ...]
    return chunks.transpose(0, 1).flatten(1, 2)


def zigzag_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    causal: bool,
    scale: float,
    dropout: float,
) -> torch.Tensor:
    """Attention of this rank's two chunks to the whole sequence.

    Args:
        query: [n, 2c, heads, d], this rank's chunks of n sequences of equal length.
        key, value: [n, 2·cp·c, kv heads, d], the whole sequences in order.

    Returns:
        [n, 2c, heads, d_v].
    """
    gqa = query.size(2) != key.size(2)
    attend = functools.partial(F.scaled_dot_product_attention, scale=scale, enable_gqa=gqa, dropout_p=dropout)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))  # [n, h, s, d]
    if not causal:
        return attend(query, key, value).transpose(1, 2)
    cp, rank, c = group.size(), group.rank(), query.size(2) // 2
    outputs = []
    for half, chunk in ((query[:, :, :c], rank), (query[:, :, c:], 2 * cp - 1 - rank)):
        end = (chunk + 1) * c
        # A chunk's tokens see everything before the chunk, and a causal square at its end.
        mask = torch.ones(c, end, dtype=torch.bool, device=query.device).tril(end - c)
        outputs.append(attend(half, key[:, :, :end], value[:, :, :end], attn_mask=mask))
    return torch.cat(outputs, dim=2).transpose(1, 2)
