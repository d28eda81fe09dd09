"""The gate of a shared expert (Qwen2-MoE, Qwen3-Next), in plain PyTorch where SGLang 0.5.23 has a Triton kernel."""

from __future__ import annotations

import torch
from torch import Tensor


def fused_gate_sigmoid_mul(hidden_states: Tensor, gate_weight: Tensor, shared_output: Tensor) -> Tensor:
    """sigmoid(hidden_states . gate_weight) x shared_output.

    Args:
        hidden_states, shared_output: [tokens, hidden].
        gate_weight: [hidden].

    Returns:
        [tokens, hidden] in shared_output's dtype; computed in float32.
    """
    gate = torch.sigmoid(hidden_states.float() @ gate_weight.float())
    return (gate.unsqueeze(-1) * shared_output.float()).to(shared_output.dtype)


def fused_gate_sigmoid_mul_add(
    hidden_states: Tensor, gate_weight: Tensor, shared_output: Tensor, final_hidden_states: Tensor
) -> None:
    """Add `fused_gate_sigmoid_mul` to the routed experts' output, in place."""
    final_hidden_states += fused_gate_sigmoid_mul(hidden_states, gate_weight, shared_output)
