"""Advantages and returns from rewards. All tensors are per sample over the whole response, unless said otherwise."""

from __future__ import annotations

import torch
from torch.nn.utils.rnn import pad_sequence

from .gae import chunked_discounted_returns


def get_grpo_returns(rewards: torch.Tensor, kl: list[torch.Tensor]) -> list[torch.Tensor]:
    """Every token of sample i gets reward i (already normalised within its group).

    Source: DeepSeekMath (GRPO, outcome supervision), arXiv:2402.03300 §4.1.2.

    Args:
        rewards: [samples].
        kl: per sample, gives the length and device of each result.
    """
    return [torch.full_like(k, r) for k, r in zip(kl, rewards.tolist(), strict=True)]


def get_reinforce_plus_plus_returns(
    rewards: torch.Tensor,
    kl: list[torch.Tensor],
    loss_masks: list[torch.Tensor],
    kl_coef: float,
    gamma: float,
) -> list[torch.Tensor]:
    """Discounted sums of KL-shaped token rewards.

    Token reward: -kl_coef * kl_t * m_t, plus the sample's reward at the last token with m = 1 (at the last token when
    none is, so a sample that is masked out gives finite numbers that the loss never sees).
    G_t = sum_k gamma^k * reward_{t+k}. Source: REINFORCE++, arXiv:2501.03262 §3.
    """
    token_rewards = []
    for reward, k, mask in zip(rewards.tolist(), kl, loss_masks, strict=True):
        shaped = -kl_coef * k * mask
        ones = mask.nonzero()
        if len(shaped):
            shaped[ones[-1, 0] if len(ones) else -1] += reward
        token_rewards.append(shaped)
    returns = chunked_discounted_returns(pad_sequence(token_rewards, batch_first=True), gamma)
    return [row[: len(k)] for row, k in zip(returns, kl, strict=True)]


def get_reinforce_plus_plus_baseline_advantages(
    rewards: torch.Tensor, kl: list[torch.Tensor], kl_coef: float
) -> list[torch.Tensor]:
    """A_t = r_i - kl_coef * kl_t, with rewards centred within their group. Source: arXiv:2501.03262 §3."""
    return [reward - kl_coef * k for reward, k in zip(rewards, kl, strict=True)]
