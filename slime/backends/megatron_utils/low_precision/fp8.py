"""FP8 (e4m3) weights: one scale per block of a matrix, or one for all of it. A weight is `quantized * scale`."""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0  # of e4m3fn
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def quantize_blocks(weight: Tensor, block: tuple[int, int], *, ue8m0: bool = False) -> tuple[Tensor, Tensor]:
    """Quantise a matrix in blocks; those at the right and lower edges may be smaller.

    Args:
        weight: `[rows, columns]`.
        block: rows and columns of a block.
        ue8m0: round scales up to powers of two.

    Returns:
        FP8 `[rows, columns]`, and float32 scales `[ceil(rows / block[0]), ceil(columns / block[1])]`.

    Raises:
        ValueError: the weight has infinite values or NaN.
    """
    blocks = _in_blocks(weight, block)
    scales = _scales(blocks.abs().amax(dim=(1, 3)), ue8m0)
    scaled = (blocks / scales[:, None, :, None]).clamp_(-FP8_MAX, FP8_MAX).to(FP8)
    rows, columns = weight.shape
    whole = scaled.reshape(scales.shape[0] * block[0], scales.shape[1] * block[1])
    return whole[:rows, :columns].contiguous(), scales


def quantize_tensor(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise with one scale: FP8 of the weight's shape, and a float32 scale `[1]`."""
    scale = _scales(weight.abs().amax().float().reshape(1), ue8m0=False)
    return (weight.float() / scale).clamp_(-FP8_MAX, FP8_MAX).to(FP8), scale


def dequantize(quantized: Tensor, scales: Tensor, block: tuple[int, int] | None) -> Tensor:
    """The float32 weight `[rows, columns]`; `block` None: one scale for all of it.

    Raises:
        ValueError: there are not as many scales as blocks.
    """
    if block is None or scales.numel() == 1:
        return quantized.float() * scales.float().reshape(())
    rows, columns = quantized.shape
    expected = (-(-rows // block[0]), -(-columns // block[1]))
    if tuple(scales.shape) != expected:
        raise ValueError(f"{rows} x {columns} weights in blocks of {block} need {expected} scales, not {scales.shape}")
    weight = quantized.float()
    scales = scales.float().repeat_interleave(block[1], dim=1)[:, :columns]
    for number, row in enumerate(range(0, rows, block[0])):  # no copy of the scales in the weight's size
        weight[row : row + block[0]] *= scales[number]
    return weight


def _in_blocks(weight: Tensor, block: tuple[int, int]) -> Tensor:
    """float32 `[block rows, rows of a block, block columns, columns of a block]`, filled up with zeros."""
    rows, columns = weight.shape
    down, right = -rows % block[0], -columns % block[1]
    padded = torch.nn.functional.pad(weight.float(), (0, right, 0, down)) if down or right else weight.float()
    return padded.view((rows + down) // block[0], block[0], (columns + right) // block[1], block[1])


def _scales(largest: Tensor, ue8m0: bool) -> Tensor:
    """Scales that map the largest magnitude to FP8's; 1 where all is zero."""
    if not torch.isfinite(largest).all():
        raise ValueError("the weight has infinite values or NaN, which no scale can hold")
    scales = (largest / FP8_MAX).clamp_min(_SMALLEST_SCALE)
    if ue8m0:
        mantissa, exponent = torch.frexp(scales)
        exponent = exponent - (mantissa == 0.5).to(exponent.dtype)  # a power of two stays itself
        scales = torch.ldexp(torch.ones_like(scales), exponent)
    return torch.where(largest == 0, torch.ones_like(scales), scales)
