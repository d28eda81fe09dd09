"""Monte-Carlo estimators of the KL divergence between two policies, from the sampled tokens' log-probs."""

from __future__ import annotations

import torch

KL_LOSS_TYPES = ("k1", "k2", "k3", "low_var_kl")
_LOW_VAR_KL_BOUND = 10.0


def compute_approx_kl(
    log_probs: torch.Tensor,
    log_probs_base: torch.Tensor,
    kl_loss_type: str,
    importance_ratio: torch.Tensor | None = None,
) -> torch.Tensor:
    """Estimate KL(policy || base) per token, in nats.

    With l = log_probs - log_probs_base: k1 = l; k2 = l^2 / 2; k3 = exp(-l) - 1 + l; low_var_kl is k3 clamped to
    [-10, 10]. Source: J. Schulman, "Approximating KL Divergence" (2020), http://joschu.net/blog/kl-approx.html.

    Args:
        log_probs: the policy's, any shape.
        log_probs_base: the base policy's, same shape.
        kl_loss_type: one of `KL_LOSS_TYPES`.
        importance_ratio: pi / pi_old per token; the estimate is multiplied by it (before the clamp), which makes it
            unbiased for tokens drawn from pi_old.

    Raises:
        ValueError: unknown `kl_loss_type`.
    """
    log_ratio = log_probs.float() - log_probs_base.float()
    if kl_loss_type == "k1":
        kl = log_ratio
    elif kl_loss_type == "k2":
        kl = log_ratio.square() / 2
    elif kl_loss_type in ("k3", "low_var_kl"):
        # expm1 keeps the small differences that exp(-l) - 1 would round away
        kl = torch.expm1(-log_ratio) + log_ratio
    else:
        raise ValueError(f"unknown KL estimator {kl_loss_type!r}: choose one of {', '.join(KL_LOSS_TYPES)}")
    if importance_ratio is not None:
        kl = importance_ratio * kl
    if kl_loss_type == "low_var_kl":
        kl = kl.clamp(-_LOW_VAR_KL_BOUND, _LOW_VAR_KL_BOUND)
    return kl
