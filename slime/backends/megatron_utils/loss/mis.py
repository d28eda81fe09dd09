"""Masked importance sampling (MIS) as a TIS function: `--custom-tis-function-path ...loss.mis_function`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from slime.backends.megatron_utils.cp_utils import all_gather_samples_with_cp, slice_log_prob_with_cp
from slime.utils.ppo_utils.mismatch import bound_weights, importance_ratio, mismatch_metrics, veto

from .importance import TisResult

Metrics = dict[str, torch.Tensor]


def mis_function(
    args: Namespace,
    *,
    pg_loss: torch.Tensor,
    train_log_probs: list[torch.Tensor],
    rollout_log_probs: list[torch.Tensor],
    loss_masks: list[torch.Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    tis_weight_means: Sequence[torch.Tensor] | None = None,
    **kwargs: Any,
) -> TisResult:
    """Weight tokens (`args.use_tis`: tis_level, tis_mode and bounds) and reject some (`args.use_rs`: rs_*, veto).

    See `slime.utils.ppo_utils.mismatch` for the formulas. Rejected tokens leave the numerator of the loss, its
    denominators stay.

    Args:
        pg_loss: flat over the local response tokens of all samples.
        train_log_probs, rollout_log_probs: per sample, local response tokens.
        loss_masks: per sample, whole responses.
        tis_weight_means: per sample, the mean weight of its optimiser step, which the weights are divided by
            (`mean_weights_of_steps`).

    Returns:
        (loss, masks of whole responses, token-shaped metrics `mis_*` over the local response tokens)
    """
    train = all_gather_samples_with_cp(train_log_probs, total_lengths, response_lengths)
    rollout = all_gather_samples_with_cp(rollout_log_probs, total_lengths, response_lengths)
    weights, masks, metrics = [], [], []
    for i, (pi, mu, mask) in enumerate(zip(train, rollout, loss_masks, strict=True)):
        weight, kept, of_sample = correct_sample(args, pi, mu, mask)
        if tis_weight_means is not None and args.use_tis:
            weight = weight / tis_weight_means[i]
            of_sample["tis_weight"] = weight
        weights.append(weight)
        masks.append(kept)
        metrics.append(of_sample)

    def local(values: Sequence[torch.Tensor]) -> torch.Tensor:
        lengths = zip(values, total_lengths, response_lengths, strict=True)
        return torch.cat([torch.as_tensor(slice_log_prob_with_cp(x, total, n)) for x, total, n in lengths])

    flat = {f"mis_{name}": local([of_sample[name] for of_sample in metrics]) for name in metrics[0]}
    return pg_loss * local(weights), masks, flat


def correct_sample(
    args: Namespace, train_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, Metrics]:
    """(weights, new mask, metrics) of one whole response."""
    log_ratio = train_log_probs - rollout_log_probs
    metrics = mismatch_metrics(train_log_probs, rollout_log_probs, mask)
    weight, kept = torch.ones_like(log_ratio), mask.to(log_ratio.dtype)
    if args.use_tis:
        weight, inside, of_tis = _tis(args, log_ratio, mask)
        kept = kept * inside
        metrics |= of_tis
    if args.use_rs:
        inside, of_rs = _rejection(args, log_ratio, mask)
        kept = kept * inside
        metrics |= of_rs
    return weight, kept, metrics


def _tis(args: Namespace, log_ratio: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Metrics]:
    ratio = importance_ratio(log_ratio, mask, args.tis_level)
    weight, inside, acted = bound_weights(ratio, args.tis_mode, args.tis_lower_bound, args.tis_upper_bound)
    metrics = {"is_ratio": ratio, "tis_weight": weight, **{f"tis_{name}": value for name, value in acted.items()}}
    return weight, inside, metrics


def _rejection(args: Namespace, log_ratio: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, Metrics]:
    """Tokens (or sequences) outside the rs bounds, which default to the tis bounds, and vetoed sequences."""
    lower = args.tis_lower_bound if args.rs_lower_bound is None else args.rs_lower_bound
    upper = args.tis_upper_bound if args.rs_upper_bound is None else args.rs_upper_bound
    ratio = importance_ratio(log_ratio, mask, args.rs_level)
    _, inside, acted = bound_weights(ratio, "mask", lower, upper)
    metrics = {f"rs_{name}": value for name, value in acted.items()}
    if args.rs_veto_threshold is not None:
        allowed = veto(log_ratio, mask, args.rs_veto_threshold)
        inside = inside * allowed
        metrics["rs_veto_fraction"] = 1 - allowed
    return inside, metrics


def mean_weights_of_steps(
    args: Namespace,
    rollout_data: dict[str, Any],
    train_log_probs: Sequence[torch.Tensor],
    group: dist.ProcessGroup | None,
) -> list[torch.Tensor]:
    """Per sample, the mean weight of its optimiser step, so that dividing by it gives mean 1 (`tis_batch_normalize`).

    Token weights are averaged over the loss tokens that the bounds keep, sequence and geometric weights over the
    sequences that have such a token. The mean is taken over the step's samples on all data-parallel ranks, so it does
    not depend on the micro-batches.

    Args:
        rollout_data: total_lengths, response_lengths, loss_masks, rollout_log_probs, micro_batch_indices,
            num_microbatches.
        train_log_probs: per sample, local response tokens.
        group: the data-parallel ranks; None: this process alone.
    """
    lengths = rollout_data["total_lengths"], rollout_data["response_lengths"]
    train = all_gather_samples_with_cp(train_log_probs, *lengths)
    rollout = all_gather_samples_with_cp(rollout_data["rollout_log_probs"], *lengths)
    steps = _samples_of_steps(rollout_data["micro_batch_indices"], rollout_data["num_microbatches"])
    sums = torch.zeros(len(steps), 2, dtype=torch.float64, device=train[0].device)
    for step, samples in enumerate(steps):
        for i in samples:
            weight, kept, _ = _tis(args, train[i] - rollout[i], rollout_data["loss_masks"][i])
            kept = kept * rollout_data["loss_masks"][i]
            if args.tis_level != "token":
                kept = kept / kept.sum().clamp(min=1)
            sums[step] += torch.stack([(weight * kept).sum(), kept.sum()]).double()
    if group is not None:
        dist.all_reduce(sums, group=group)
    means = torch.where(sums[:, 1] > 0, sums[:, 0] / sums[:, 1].clamp(min=1e-12), 1.0).float()
    step_of = {i: step for step, samples in enumerate(steps) for i in samples}
    return [means[step_of[i]] for i in range(len(train))]


def _samples_of_steps(
    micro_batch_indices: Sequence[Sequence[int]], num_microbatches: Sequence[int]
) -> list[list[int]]:
    remaining = iter(micro_batch_indices)
    return [[i for _ in range(count) for i in next(remaining)] for count in num_microbatches]
