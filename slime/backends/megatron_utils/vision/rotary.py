"""Rotary embeddings with places in time, height and width. Written for megatron-core 0.16.1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class InterleavedRotaryEmbedding(torch.nn.Module):
    """Frequencies take turns between the three axes, as in Qwen3-VL and Qwen3.5; Megatron's has them in blocks.

    Args:
        width: entries of each head that are rotated.
        base: of the frequencies.
    """

    def __init__(self, width: int, base: float) -> None:
        super().__init__()
        # no buffer: a model in 16 bit would round it
        self.inv_freq = 1.0 / (base ** (torch.arange(0, width, 2, dtype=torch.float32, device="cpu") / width))

    def forward(self, position_ids: Tensor, mrope_section: Sequence[int], cp_group: Any = None) -> Tensor:
        """Angles [length, batch, 1, width], the same in both halves.

        Args:
            position_ids: [3, batch, length].
            mrope_section: frequencies of each axis; height has every third from the second, width from the third.
            cp_group: of no consequence: attention takes this rank's part of a packed sequence's angles itself.
        """
        angles = position_ids[..., None].float() * self.inv_freq.to(position_ids.device)
        merged = angles[0].clone()
        for axis in (1, 2):
            theirs = slice(axis, 3 * mrope_section[axis], 3)
            merged[..., theirs] = angles[axis, ..., theirs]
        return torch.cat((merged, merged), dim=-1).transpose(0, 1)[:, :, None]
