"""Generalised advantage estimation and discounted sums, computed in chunks."""

from __future__ import annotations

import torch
from torch.nn.utils.rnn import pad_sequence


def get_ppo_token_rewards(
    rewards: torch.Tensor, kl: list[torch.Tensor], loss_masks: list[torch.Tensor], kl_coef: float
) -> list[torch.Tensor]:
    """Rewards of single tokens: -kl_coef * kl_t * m_t, plus the sample's reward at its last token with m = 1.

    A sample whose mask is nowhere 1 has no token to reward: all of its values are 0. Source: Ziegler et al.,
    arXiv:1909.08593 eq. 2, with the reward model's score at the end of the response.

    Args:
        rewards: [samples].
        kl: per sample, [response length], against the reference policy; not changed.
        loss_masks: per sample, [response length], 1 for the policy's own tokens.
    """
    token_rewards = []
    for reward, k, mask in zip(rewards.tolist(), kl, loss_masks, strict=True):
        shaped = -kl_coef * k * mask
        if len(ones := mask.nonzero()):
            shaped[ones[-1, 0]] += reward
        token_rewards.append(shaped)
    return token_rewards


def get_advantages_and_returns_batch(
    values_list: list[torch.Tensor],
    rewards_list: list[torch.Tensor],
    gamma: float,
    lambd: float,
    loss_masks: list[torch.Tensor] | None = None,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """GAE for samples of different lengths; see `vanilla_gae`.

    With `loss_masks`, time runs over the tokens with mask 1 alone: what the environment wrote between two of the
    policy's tokens is no action, so it neither discounts nor takes part. Tokens with mask 0 get advantage 0 and their
    own value as return; no loss counts them.

    Args:
        values_list: per sample, [response length], the critic's values.
        rewards_list: per sample, [response length], token rewards.
        loss_masks: per sample, [response length]; default: all ones.

    Returns:
        (advantages, returns) per sample.
    """
    if loss_masks is None:
        loss_masks = [torch.ones_like(v) for v in values_list]
    kept = [mask.bool() for mask in loss_masks]
    values = pad_sequence([v[keep] for v, keep in zip(values_list, kept, strict=True)], batch_first=True)
    rewards = pad_sequence([r[keep] for r, keep in zip(rewards_list, kept, strict=True)], batch_first=True)
    compact, _ = chunked_gae(rewards, values, gamma, lambd)
    advantages = []
    for row, value, keep in zip(compact, values_list, kept, strict=True):
        advantages.append(torch.zeros_like(value).masked_scatter(keep, row[: int(keep.sum())]))
    return advantages, [a + v for a, v in zip(advantages, values_list, strict=True)]


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
