"""Adam that keeps no moments (`--use-stateless-adam`): every step is Adam's first step."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer


class StatelessAdam(torch.optim.Optimizer):
    """Adam with moments that begin at zero in each step, so that nothing is kept between steps.

    Of Adam's first step (Kingma & Ba 2015, t = 1) remains, per element with gradient g:
    p = p - lr·wd·p - lr · g / (|g| + eps). Without bias correction the last term is
    lr · (1-b1) g / (sqrt(1-b2) |g| + eps). With `adam_w_mode=False` the decay wd·p is added to g instead.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.bias_correction = bias_correction
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Apply one update to every parameter that has a gradient."""
        if closure is not None:
            raise ValueError("StatelessAdam takes no closure")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad.to(parameter.dtype), group)

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        decay = group["weight_decay"]
        if decay and self.adam_w_mode:
            parameter.mul_(1 - group["lr"] * decay)
        elif decay:
            gradient = gradient.add(parameter, alpha=decay)
        beta1, beta2 = (0.0, 0.0) if self.bias_correction else group["betas"]
        scale = gradient.abs().mul_((1 - beta2) ** 0.5).add_(group["eps"])
        parameter.addcdiv_(gradient, scale, value=-group["lr"] * (1 - beta1))


def drop_moments(args: Namespace, optimizer: MegatronOptimizer) -> None:
    """Put `StatelessAdam` in the place of the Adam inside each of Megatron's optimizers, over the same parameters.

    Megatron's constructor accepts only its own Adam, so this follows it. Written for megatron-core 0.16.1.

    Raises:
        RuntimeError: an Adam that has kept something already, or an optimizer without one.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if getattr(part, "is_stub_optimizer", False):
            continue
        inner = part.optimizer
        if inner is None or len(inner.state) or "betas" not in inner.defaults:
            raise RuntimeError(f"--use-stateless-adam: {type(inner).__name__} is not an Adam before its first step")
        part.optimizer = StatelessAdam([torch.zeros(0)], **_settings(inner), adam_w_mode=args.decoupled_weight_decay)
        # Set, not passed: shards of float32 weights are views, which a constructor refuses.
        part.optimizer.param_groups = inner.param_groups
        part.init_state_fn = _keep_nothing


def _keep_nothing(*_: Any) -> None:
    """Megatron calls it where Adam's moments would come into being."""


def _settings(adam: torch.optim.Optimizer) -> dict[str, Any]:
    """What every Adam (torch's, Apex's, Transformer Engine's, ours) has under the same names."""
    return {name: adam.defaults[name] for name in ("lr", "betas", "eps", "weight_decay")}
