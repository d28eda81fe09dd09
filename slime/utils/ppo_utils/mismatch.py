"""Importance weights and rejection for data that another policy sampled than the one that trains ("MIS").

Masked importance sampling between an engine mu and the trainer's policy pi, per sample over whole responses. Sources:
Liu et al., "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch" (2025), §4
(token and sequence weights, truncated and masked; geometric means), and Yao et al., "Your Efficient RL Framework
Secretly Brings You Off-Policy RL Training" (2025) (truncation).
"""

from __future__ import annotations

import torch

LEVELS = ("token", "sequence", "geometric")
MODES = ("truncate", "clip", "mask")
# exp() of more than this in either direction says nothing but "far off"
SAFETY_BOUND = 20.0


def importance_ratio(log_ratio: torch.Tensor, mask: torch.Tensor, level: str) -> torch.Tensor:
    """rho per token: exp(l_t), or one number for the sequence, exp(sum_t m_t l_t) or exp(mean over m of l_t).

    Exponents are clamped to [-20, 20].

    Args:
        log_ratio: [response length], l = log pi - log mu.
        mask: [response length], 1 where a token counts.
        level: one of `LEVELS`.

    Raises:
        ValueError: unknown level.
    """
    if level not in LEVELS:
        raise ValueError(f"unknown level of importance weights {level!r}: choose one of {', '.join(LEVELS)}")
    if level != "token":
        total = (log_ratio * mask).sum()
        log_ratio = (total / mask.sum().clamp(min=1) if level == "geometric" else total).expand_as(log_ratio)
    return log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp()


def bound_weights(
    ratio: torch.Tensor, mode: str, lower: float | None, upper: float
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Keep importance weights from exploding.

    truncate: w = min(rho, upper). clip: w = clamp(rho, lower, upper). mask: w = rho, and tokens outside of
    [lower, upper] are rejected. `lower` defaults to 1 / upper for the last two.

    Args:
        ratio: any shape.

    Returns:
        (weights, 1 where the token is kept and 0 where it is rejected, {name: 1 where the bound acted}), all of the
        input's shape.

    Raises:
        ValueError: unknown mode.
    """
    kept = torch.ones_like(ratio)
    if mode == "truncate":
        return ratio.clamp(max=upper), kept, {"truncate_fraction": (ratio > upper).float()}
    low = 1.0 / upper if lower is None else lower
    below, above = (ratio < low).float(), (ratio > upper).float()
    acted = {f"{mode}_fraction_low": below, f"{mode}_fraction_high": above}
    if mode == "clip":
        return ratio.clamp(low, upper), kept, acted
    if mode == "mask":
        return ratio, kept - below - above, acted
    raise ValueError(f"unknown mode of importance weights {mode!r}: choose one of {', '.join(MODES)}")


def veto(log_ratio: torch.Tensor, mask: torch.Tensor, threshold: float) -> torch.Tensor:
    """0 for every token of a sequence in which some token with mask 1 has rho < threshold, else 1."""
    catastrophic = (log_ratio < torch.tensor(threshold).log()) & (mask > 0)
    return (~catastrophic.any()).to(log_ratio.dtype).expand_as(log_ratio)


def mismatch_metrics(
    train_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, mask: torch.Tensor
) -> dict[str, torch.Tensor]:
    """How far pi (train) is from mu (rollout) on one response; values of the whole sequence stand at every token.

    With l = log pi - log mu and rho = exp(l): kl = -l (KL(mu || pi), k1), k3_kl = rho - 1 - l,
    chi2_token = rho^2 - 1, chi2_seq = exp(2 sum m l) - 1; *_log_ppl = -mean over m of the log-probs, *_ppl = exp of
    it, log_ppl_diff = training - rollout, ppl_ratio = exp of that. Exponents are clamped to [-20, 20].
    """
    count = mask.sum().clamp(min=1)
    log_ratio = train_log_probs - rollout_log_probs
    train, rollout = -(train_log_probs * mask).sum() / count, -(rollout_log_probs * mask).sum() / count

    def exp(x: torch.Tensor) -> torch.Tensor:
        return x.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp()

    of_sequence = {
        "training_log_ppl": train,
        "training_ppl": exp(train),
        "rollout_log_ppl": rollout,
        "rollout_ppl": exp(rollout),
        "log_ppl_diff": train - rollout,
        "log_ppl_abs_diff": (train - rollout).abs(),
        "ppl_ratio": exp(train - rollout),
        "chi2_seq": exp(2 * (log_ratio * mask).sum()) - 1,
    }
    metrics = {name: value.expand_as(log_ratio) for name, value in of_sequence.items()}
    ratio = exp(log_ratio)
    return metrics | {"kl": -log_ratio, "k3_kl": ratio - 1 - log_ratio, "chi2_token": exp(2 * log_ratio) - 1}
