"""CpuFusedAdam against the formula in float64 and against torch's AdamW."""

from __future__ import annotations

import copy

import pytest
import torch

from slime.backends.megatron_utils.cpu.adam import CpuFusedAdam


def _run(make, steps=5, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    params = [torch.nn.Parameter(torch.randn(n, generator=generator).to(dtype)) for n in (7, 3)]
    optimizer = make(params)
    grads = []
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(dtype)
            grads.append(param.grad.clone())
        optimizer.step()
    return params, optimizer, grads


def _formula(start, grads, lr, b1, b2, eps, wd, decoupled):
    p, m, v = start.double(), torch.zeros_like(start).double(), torch.zeros_like(start).double()
    for t, g in enumerate((g.double() for g in grads), 1):
        g = g if decoupled else g + wd * p
        p = p * (1 - lr * wd) if decoupled else p
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        p = p - lr * (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + eps)
    return p


@pytest.mark.parametrize("decoupled", [True, False])
def test_equals_the_formula(decoupled):
    options = {"lr": 0.01, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.1}
    params, _, grads = _run(lambda p: CpuFusedAdam(p, adam_w_mode=decoupled, **options), dtype=torch.float64)
    start = torch.randn(7, generator=torch.Generator().manual_seed(1)).double()
    expected = _formula(start, grads[::2], 0.01, 0.9, 0.98, 1e-8, 0.1, decoupled)
    torch.testing.assert_close(params[0].detach(), expected, rtol=0, atol=1e-12)


def test_equals_torchs_adamw_bit_for_bit():
    ours, _, _ = _run(lambda p: CpuFusedAdam(p, lr=0.01, weight_decay=0.1))
    theirs, _, _ = _run(lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True))
    for a, b in zip(ours, theirs, strict=True):
        assert a.equal(b)


def test_the_step_stands_in_the_group_and_survives_a_state_dict():
    params, optimizer, _ = _run(CpuFusedAdam, steps=3)
    assert optimizer.param_groups[0]["step"] == 3
    assert set(optimizer.state[params[0]]) == {"exp_avg", "exp_avg_sq"}
    copies = [torch.nn.Parameter(p.detach().clone()) for p in params]
    restored = CpuFusedAdam(copies)
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for new, old in zip(copies, params, strict=True):
        new.grad = old.grad = torch.ones_like(old)
    optimizer.step()
    restored.step()
    assert all(new.equal(old) for new, old in zip(copies, params, strict=True))


def test_parameters_without_gradient_stay():
    still, moving = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = CpuFusedAdam([still, moving], lr=0.1, weight_decay=0.5)
    moving.grad = torch.ones(2)
    optimizer.step()
    assert still.tolist() == [1.0, 1.0] and moving[0] < 1.0


def test_what_the_kernel_does_not_have_is_refused():
    with pytest.raises(ValueError, match="bias_correction"):
        CpuFusedAdam([torch.nn.Parameter(torch.ones(1))], bias_correction=False)
