"""The CPU's rotary embedding against the formula, in values and gradients."""

from __future__ import annotations

import pytest
import torch

from slime.backends.megatron_utils.cpu.rope import rotate_halves


@pytest.mark.parametrize("rotated", [8, 6])
@pytest.mark.parametrize("mscale", [1.0, 1.3])
def test_rotation_and_its_gradient(rotated: int, mscale: float) -> None:
    """Also with a tail that is not rotated, on strided input."""
    torch.manual_seed(0)
    base = torch.randn(5, 1, 3, 16, dtype=torch.float64)
    t = base[..., ::2].detach().requires_grad_()
    half = torch.randn(5, 1, 1, rotated // 2, dtype=torch.float64)
    freqs = torch.cat([half, half], dim=-1)
    ours = rotate_halves(t, freqs, mscale)
    head, tail = t[..., :rotated], t[..., rotated:]
    turned = torch.cat([-head[..., rotated // 2 :], head[..., : rotated // 2]], dim=-1)
    expected = torch.cat([head * freqs.cos() * mscale + turned * freqs.sin() * mscale, tail], dim=-1)
    torch.testing.assert_close(ours, expected)
    weights = torch.randn_like(expected)
    (gradient,) = torch.autograd.grad((ours * weights).sum(), t)
    (reference,) = torch.autograd.grad((expected * weights).sum(), t)
    torch.testing.assert_close(gradient, reference)
