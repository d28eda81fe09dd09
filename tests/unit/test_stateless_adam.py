"""StatelessAdam against the formula in float64, and against Adam's first step."""

from __future__ import annotations

import pytest
import torch

from slime.backends.megatron_utils.cpu.adam import CpuFusedAdam
from slime.backends.megatron_utils.stateless_adam import StatelessAdam


def _steps(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, gradients: list[torch.Tensor]) -> None:
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()


@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("decoupled", [True, False])
def test_equals_the_formula(bias_correction: bool, decoupled: bool) -> None:
    lr, (b1, b2), eps, decay = 0.01, (0.9, 0.98), 1e-3, 0.1
    start = torch.randn(7, dtype=torch.float64)
    gradients = [torch.randn(7, dtype=torch.float64) * 0.01 for _ in range(3)]
    parameter = torch.nn.Parameter(start.clone())
    optimizer = StatelessAdam(
        [parameter], lr, (b1, b2), eps, decay, bias_correction=bias_correction, adam_w_mode=decoupled
    )
    _steps(optimizer, parameter, gradients)
    expected = start
    for gradient in gradients:
        g = gradient if decoupled else gradient + decay * expected
        expected = expected * (1 - lr * decay) if decoupled else expected
        m, v = (1 - b1) * g, (1 - b2) * g * g
        if bias_correction:
            m, v = m / (1 - b1), v / (1 - b2)
        expected = expected - lr * m / (v.sqrt() + eps)
    torch.testing.assert_close(parameter.detach(), expected, rtol=0, atol=1e-14)


def test_is_adam_begun_anew_and_keeps_nothing() -> None:
    gradients = [torch.randn(5) for _ in range(3)]
    ours, theirs = torch.nn.Parameter(torch.ones(5)), torch.nn.Parameter(torch.ones(5))
    optimizer = StatelessAdam([ours], lr=0.01, weight_decay=0.1)
    _steps(optimizer, ours, gradients)
    for gradient in gradients:
        _steps(CpuFusedAdam([theirs], lr=0.01, weight_decay=0.1), theirs, [gradient])
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    assert not optimizer.state and optimizer.state_dict()["state"] == {}
