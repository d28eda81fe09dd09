"""MurmurHash3 (32 bits) of (seed, position, token id) in plain PyTorch: the noise of SGLang's seeded sampling."""

from __future__ import annotations

import torch

_MASK = 0xFFFFFFFF


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """Hash each row's seed and position with each column index.

    The 16 bytes hashed are the 64-bit seed (low word first), the 32-bit position and the 32-bit column, as in SGLang's
    Triton kernel of the same name (Appleby's MurmurHash3_x86_32 with seed 0).

    Args:
        seed: [rows], int64.
        positions: [rows], integer.
        col_indices: [columns], integer.

    Returns:
        [rows, columns], uint32.
    """
    seeds = seed.to(torch.int64)[:, None]
    rows = positions.to(torch.int64)[:, None] & _MASK
    columns = col_indices.to(torch.int64)[None, :] & _MASK

    state = _mix(torch.zeros_like(seeds), seeds & _MASK)
    state = _mix(state, (seeds >> 32) & _MASK)
    state = _mix(state, rows)
    state = _mix(state.expand(-1, columns.shape[1]), columns)
    return _finalize(state ^ 16).to(torch.uint32)


def _rotate_left(word: torch.Tensor, bits: int) -> torch.Tensor:
    return ((word << bits) & _MASK) | (word >> (32 - bits))


def _mix(state: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    block = _rotate_left((block * 0xCC9E2D51) & _MASK, 15)
    state = _rotate_left(state ^ ((block * 0x1B873593) & _MASK), 13)
    return (state * 5 + 0xE6546B64) & _MASK


def _finalize(state: torch.Tensor) -> torch.Tensor:
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & _MASK
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & _MASK
    return state ^ (state >> 16)
