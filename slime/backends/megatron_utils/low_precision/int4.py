"""Symmetric INT4 weights in compressed-tensors' `pack-quantized` format: a scale per group of a row's columns, eight
values in an int32. A weight is `quantized * scale`."""

from __future__ import annotations

import torch
from torch import Tensor

_BITS = 4
_PER_WORD = 32 // _BITS
_OFFSET = 8  # stored values are unsigned
_LARGEST = 7


def quantize_groups(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise a matrix `[rows, columns]`.

    Returns:
        packed int32 `[rows, ceil(columns / 8)]`, scales `[rows, columns / group_size]` in the weight's dtype, and the
        shape as int64 `[2]`: compressed-tensors' `weight_packed`, `weight_scale`, `weight_shape`.

    Raises:
        ValueError: the columns are not a multiple of the group, or the weight has infinite values or NaN.
    """
    rows, columns = weight.shape
    if columns % group_size:
        raise ValueError(f"{columns} columns can't be divided into groups of {group_size}: leave this weight out")
    groups = weight.float().view(rows, columns // group_size, group_size)
    largest = groups.abs().amax(dim=-1)
    if not torch.isfinite(largest).all():
        raise ValueError("the weight has infinite values or NaN, which no scale can hold")
    # rounded as they are stored, so that the values are those nearest to the stored scale's
    scales = torch.where(largest == 0, torch.ones_like(largest), largest / _LARGEST).to(weight.dtype)
    scales = torch.where(scales == 0, torch.full_like(scales, torch.finfo(weight.dtype).tiny), scales)
    values = (groups / scales.float()[..., None]).round_().clamp_(-_OFFSET, _LARGEST).to(torch.int32)
    return pack(values.view(rows, columns)), scales, torch.tensor([rows, columns])


def dequantize(packed: Tensor, scales: Tensor, shape: Tensor, zero_point: Tensor | None = None) -> Tensor:
    """The float32 weight; `zero_point` is packed along the rows (`weight_zero_point` of asymmetric checkpoints)."""
    rows, columns = (int(size) for size in shape)
    values = unpack(packed, columns)
    group = columns // scales.shape[1]
    if zero_point is not None:
        values = values - unpack(zero_point.T.contiguous(), rows).T.repeat_interleave(group, dim=1)
    return values.float() * scales.float().repeat_interleave(group, dim=1)


def pack(values: Tensor) -> Tensor:
    """int32 values of -8..7 `[rows, columns]` as words `[rows, ceil(columns / 8)]`, the first in the lowest bits."""
    missing = -values.shape[1] % _PER_WORD
    unsigned = values + _OFFSET
    if missing:
        unsigned = torch.nn.functional.pad(unsigned, (0, missing))
    words = unsigned.view(values.shape[0], -1, _PER_WORD)
    shifts = torch.arange(0, 32, _BITS, dtype=torch.int32, device=values.device)
    return (words << shifts).sum(dim=-1, dtype=torch.int32)


def unpack(words: Tensor, columns: int) -> Tensor:
    """The int32 values -8..7 `[rows, columns]` of packed words."""
    shifts = torch.arange(0, 32, _BITS, dtype=torch.int32, device=words.device)
    values = ((words[..., None] >> shifts) & 0xF) - _OFFSET
    return values.reshape(words.shape[0], -1)[:, :columns]
