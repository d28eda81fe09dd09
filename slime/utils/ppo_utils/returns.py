"""Advantages and returns from rewards. All tensors are per sample over the whole response, unless said otherwise."""

from __future__ import annotations

import torch
from torch.nn.utils.rnn import pad_sequence


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


def get_advantages_and_returns_batch(
    values_list: list[torch.Tensor],
    rewards_list: list[torch.Tensor],
    gamma: float,
    lambd: float,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """GAE for samples of different lengths; see `vanilla_gae`.

    Args:
        values_list: per sample, [response length], the critic's values.
        rewards_list: per sample, [response length], token rewards.

    Returns:
        (advantages, returns) per sample.
    """
    lengths = [len(v) for v in values_list]
    values = pad_sequence(values_list, batch_first=True)
    rewards = pad_sequence(rewards_list, batch_first=True)
    advantages, returns = chunked_gae(rewards, values, gamma, lambd)
    return (
        [row[:n] for row, n in zip(advantages, lengths, strict=True)],
        [row[:n] for row, n in zip(returns, lengths, strict=True)],
    )


def vanilla_gae(
    rewards: torch.Tensor, values: torch.Tensor, gamma: float, lambd: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation, one step at a time.

    delta_t = r_t + gamma * V_{t+1} - V_t (V after the end is 0); A_t = sum_k (gamma * lambd)^k * delta_{t+k}; returns
    are A + V. Source: Schulman et al., arXiv:1506.02438 eq. 16.

    Args:
        rewards, values: [batch, time].
    """
    advantages = torch.zeros_like(rewards)
    carry = torch.zeros_like(rewards[:, 0])
    next_value = torch.zeros_like(carry)
    for t in reversed(range(rewards.size(1))):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        carry = delta + gamma * lambd * carry
        advantages[:, t] = carry
        next_value = values[:, t]
    return advantages, advantages + values


def chunked_gae(
    rewards: torch.Tensor, values: torch.Tensor, gamma: float, lambd: float, chunk_size: int = 128
) -> tuple[torch.Tensor, torch.Tensor]:
    """`vanilla_gae` by `chunked_discounted_returns`: the same up to rounding, with few steps for long responses."""
    next_values = torch.nn.functional.pad(values[:, 1:], (0, 1))
    deltas = rewards + gamma * next_values - values
    advantages = chunked_discounted_returns(deltas, gamma * lambd, chunk_size)
    return advantages, advantages + values


def chunked_discounted_returns(rewards: torch.Tensor, discount: float, chunk_size: int = 128) -> torch.Tensor:
    """G_t = sum_k discount^k * reward_{t+k}, chunk by chunk from the end.

    Inside a chunk the sums are one product with the upper-triangular matrix of powers; between chunks one value per
    row is carried.

    Args:
        rewards: [batch, time].
    """
    batch, time = rewards.shape
    if time == 0:
        return rewards.clone()
    padding = -time % chunk_size if time > chunk_size else 0
    width = min(chunk_size, time)
    chunks = torch.nn.functional.pad(rewards, (0, padding)).view(batch, -1, width)
    steps = torch.arange(width, device=rewards.device)
    distance = (steps[:, None] - steps[None, :]).to(rewards.dtype)  # [k, t]: how far k lies after t
    powers = torch.where(distance >= 0, torch.full_like(distance, discount).pow(distance), 0.0)
    inside = chunks @ powers
    carry_weights = torch.full((width,), discount, dtype=rewards.dtype, device=rewards.device).pow(width - steps)
    carry = torch.zeros_like(inside[:, 0, :1])
    for i in reversed(range(inside.size(1))):
        inside[:, i] += carry * carry_weights
        carry = inside[:, i, :1]
    return inside.reshape(batch, -1)[:, :time]
