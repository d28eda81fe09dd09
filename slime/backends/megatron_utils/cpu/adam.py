"""Adam for the CPU with the interface of Apex's and Transformer Engine's FusedAdam, on torch's fused kernel.

Megatron's distributed optimizer can load a checkpoint only into an optimizer that keeps `step` in the parameter group,
as FusedAdam does; torch's own AdamW keeps it per parameter. `source_rules` puts it into Megatron's optimizer modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class CpuFusedAdam(torch.optim.Optimizer):
    """Adam (`adam_w_mode=False`) or AdamW over parameter groups; state `exp_avg` and `exp_avg_sq` per parameter.

    Update per element, with g the gradient and t the group's step (Kingma & Ba 2015; Loshchilov & Hutter 2019):
    m = b1 m + (1-b1) g; v = b2 v + (1-b2) g²; p = p - lr·wd·p - lr · (m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps).

    Raises:
        ValueError: `bias_correction=False`, which torch's kernel does not have.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
    ) -> None:
        if not bias_correction:
            raise ValueError("CpuFusedAdam always corrects the bias; bias_correction=False is not supported")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._kernel = torch._fused_adamw_ if adam_w_mode else torch._fused_adam_

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Apply one update to every parameter that has a gradient."""
        if closure is not None:
            raise ValueError("CpuFusedAdam takes no closure")
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            with_grad = [p for p in group["params"] if p.grad is not None]
            if with_grad:
                self._update(group, with_grad)

    def _update(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        states = [self._state_of(p) for p in params]
        # One tensor per parameter: the kernel does not accept a shared one.
        steps = [torch.tensor(float(group["step"])) for _ in params]
        beta1, beta2 = group["betas"]
        self._kernel(
            params,
            [p.grad for p in params],
            [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states],
            [],
            steps,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )

    def _state_of(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        state = self.state[param]
        if not state:
            state.update(exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
        return state
