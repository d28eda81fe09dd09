"""Per-token policy losses and the sequence-level quantities that some of them need."""

from __future__ import annotations

from argparse import Namespace

import torch


def compute_policy_loss(
    ppo_kl: torch.Tensor,
    advantages: torch.Tensor,
    eps_clip: float,
    eps_clip_high: float,
    eps_clip_c: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Clipped surrogate loss per token, with the optional dual clip.

    With ratio = exp(-ppo_kl): L = max(-ratio * A, -clip(ratio, 1 - eps_clip, 1 + eps_clip_high) * A); where A < 0 and
    a dual-clip constant is given, L = min(L, -eps_clip_c * A).
    Sources: Schulman et al., arXiv:1707.06347 eq. 7; dual clip: Ye et al., arXiv:1912.09729 eq. 5;
    asymmetric bounds: DAPO, arXiv:2503.14476 eq. 10.

    Args:
        ppo_kl: log pi_old - log pi, any shape.
        advantages: same shape.
        eps_clip: lower clip distance.
        eps_clip_high: upper clip distance.
        eps_clip_c: dual-clip constant, greater than 1.

    Returns:
        (loss, clip fraction), both of the inputs' shape; the second is 1 where the clipped term is the larger one.

    Raises:
        ValueError: `eps_clip_c` is not greater than 1.
    """
    ratio = torch.exp(-ppo_kl)
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1.0 - eps_clip, 1.0 + eps_clip_high) * advantages
    loss = torch.maximum(unclipped, clipped)
    clipfrac = (clipped > unclipped).float()
    if eps_clip_c is not None:
        if eps_clip_c <= 1.0:
            raise ValueError(f"the dual-clip constant eps_clip_c must be greater than 1, got {eps_clip_c}")
        loss = torch.where(advantages < 0, torch.minimum(loss, -eps_clip_c * advantages), loss)
    return loss, clipfrac


def compute_cispo_loss(
    ppo_kl: torch.Tensor,
    log_probs: torch.Tensor,
    advantages: torch.Tensor,
    eps_clip: float,
    eps_clip_high: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """REINFORCE weighted by a clipped importance ratio that carries no gradient.

    L = -sg(clip(exp(-ppo_kl), 1 - eps_clip, 1 + eps_clip_high)) * A * log_probs.
    Source: MiniMax-M1, arXiv:2506.13585 eq. 4.

    Returns:
        (loss, clip fraction), both of the inputs' shape.
    """
    ratio = torch.exp(-ppo_kl.detach())
    clipped = ratio.clamp(1.0 - eps_clip, 1.0 + eps_clip_high)
    return -clipped * advantages * log_probs, (clipped != ratio).float()


def masked_sequence_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean of `values` where `mask` is one; 0 when it is nowhere one."""
    return (values * mask).sum() / mask.sum().clamp(min=1)


def compute_gspo_kl(
    full_log_probs: list[torch.Tensor],
    full_old_log_probs: list[torch.Tensor],
    local_log_probs: list[torch.Tensor],
    loss_masks: list[torch.Tensor],
) -> torch.Tensor:
    """Sequence mean of log pi_old - log pi, repeated for every token of the sequence.

    Source: GSPO, arXiv:2507.18071 eq. 7 (the length-normalised sequence ratio).

    Args:
        full_log_probs: per sample, whole responses (gathered over context-parallel ranks), differentiable.
        full_old_log_probs: same shapes, under the policy that sampled.
        local_log_probs: per sample, the slice that this rank holds: gives the lengths of the result.
        loss_masks: per sample, whole responses.

    Returns:
        One flat tensor over the local tokens of all samples.
    """
    parts = [
        masked_sequence_mean(old - new, mask).expand_as(local)
        for new, old, local, mask in zip(full_log_probs, full_old_log_probs, local_log_probs, loss_masks, strict=True)
    ]
    return torch.cat(parts)


def compute_opsm_mask(
    args: Namespace,
    full_log_probs: list[torch.Tensor],
    full_old_log_probs: list[torch.Tensor],
    advantages: list[torch.Tensor],
    loss_masks: list[torch.Tensor],
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Off-policy sequence mask: drop whole sequences that are bad and far from the sampling policy.

    A sequence is dropped when its mean advantage is negative and its mean of log pi_old - log pi exceeds
    `args.opsm_delta`. Source: DeepSeek-V3.2, arXiv:2512.02556 §3.1. The decision is one per sequence, so tokens with
    a positive advantage inside a dropped sequence go too.

    Args:
        full_log_probs, full_old_log_probs, advantages, loss_masks: per sample, whole responses of equal length.

    Returns:
        (masks of ones or zeros per sample, number of dropped sequences as a 0-d tensor).
    """
    masks: list[torch.Tensor] = []
    dropped: list[torch.Tensor] = []
    for new, old, advantage, mask in zip(full_log_probs, full_old_log_probs, advantages, loss_masks, strict=True):
        is_far = masked_sequence_mean(old - new.detach(), mask) > args.opsm_delta
        drop = (is_far & (masked_sequence_mean(advantage, mask) < 0)).float()
        masks.append((1.0 - drop).expand_as(advantage))
        dropped.append(drop)
    return masks, torch.stack(dropped).sum()
