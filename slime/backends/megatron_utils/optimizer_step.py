"""One optimiser step that a gradient which is not finite can't spoil. Written for megatron-core 0.16.1."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer


def step_if_finite(optimizer: MegatronOptimizer) -> tuple[bool, float | None]:
    """Clip and step, or leave weights and optimiser state alone when the gradient holds an inf or nan.

    It is `ChainedOptimizer.step` with the check between norm and clipping; calling that after a check would unscale
    the gradients twice. The norm is reduced over all ranks, so all decide alike.

    Returns:
        (whether the weights changed, the gradient norm before clipping; None when it is not finite)
    """
    overflow = optimizer.prepare_grads()
    grad_norm = optimizer.get_grad_norm()
    if overflow or not math.isfinite(grad_norm):
        return False, None
    _clip(optimizer, grad_norm)
    return optimizer.step_with_ready_grads(), float(grad_norm)


def reset_moments(optimizer: MegatronOptimizer) -> None:
    """Put Adam back to before its first step: moments and step count at 0 (`--reset-optimizer-states`)."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if getattr(part, "is_stub_optimizer", False):
            continue
        for group in part.optimizer.param_groups:
            if "step" in group:
                group["step"] = 0
        for state in part.optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq", "step"):
                if hasattr(state.get(name), "zero_"):
                    state[name].zero_()


def _clip(optimizer: MegatronOptimizer, grad_norm: float) -> None:
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if getattr(part, "is_stub_optimizer", False) or part.config.clip_grad <= 0.0:
            continue
        if parameters := part.get_parameters():
            clip_grad_by_total_norm_fp32(
                parameters,
                max_norm=part.config.clip_grad,
                total_norm=grad_norm,
                use_decoupled_grad=part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
            )
