"""Losses of the trainer: log-probs out of logits, advantages, policy, value and SFT losses, their reduction."""

from __future__ import annotations

from .advantages import apply_opd_kl_to_advantages, compute_advantages_and_returns
from .importance import icepop_function, vanilla_tis_function
from .log_probs import get_log_probs_and_entropy, get_values
from .mis import mis_function
from .policy import policy_loss_function
from .reduction import loss_function
from .supervised import sft_loss_function, value_loss_function

__all__ = [
    "apply_opd_kl_to_advantages",
    "compute_advantages_and_returns",
    "get_log_probs_and_entropy",
    "get_values",
    "icepop_function",
    "loss_function",
    "mis_function",
    "policy_loss_function",
    "sft_loss_function",
    "value_loss_function",
    "vanilla_tis_function",
]
