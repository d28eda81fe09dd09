"""The maths of policy optimisation: pure functions on tensors, split by job."""

from __future__ import annotations

from .gae import (
    chunked_discounted_returns,
    chunked_gae,
    get_advantages_and_returns_batch,
    get_ppo_token_rewards,
    vanilla_gae,
)
from .kl import KL_LOSS_TYPES, compute_approx_kl
from .log_probs import calculate_log_probs_and_entropy
from .policy_loss import compute_cispo_loss, compute_gspo_kl, compute_opsm_mask, compute_policy_loss
from .returns import (
    get_grpo_returns,
    get_reinforce_plus_plus_baseline_advantages,
    get_reinforce_plus_plus_returns,
)

__all__ = [
    "KL_LOSS_TYPES",
    "calculate_log_probs_and_entropy",
    "chunked_discounted_returns",
    "chunked_gae",
    "compute_approx_kl",
    "compute_cispo_loss",
    "compute_gspo_kl",
    "compute_opsm_mask",
    "compute_policy_loss",
    "get_advantages_and_returns_batch",
    "get_grpo_returns",
    "get_ppo_token_rewards",
    "get_reinforce_plus_plus_baseline_advantages",
    "get_reinforce_plus_plus_returns",
    "vanilla_gae",
]
