"""Advantages and returns of a rollout, on the last pipeline stage."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from slime.backends.megatron_utils.cp_utils import (
    ContextParallel,
    all_gather_samples_with_cp,
    current_context_parallel,
    slice_log_prob_with_cp,
)
from slime.utils.misc import load_function
from slime.utils.ppo_utils import (
    compute_approx_kl,
    get_advantages_and_returns_batch,
    get_grpo_returns,
    get_ppo_token_rewards,
    get_reinforce_plus_plus_baseline_advantages,
    get_reinforce_plus_plus_returns,
)


def compute_advantages_and_returns(args: Namespace, rollout_data: dict[str, Any]) -> None:
    """Set `advantages`, `returns` and `kl` (against the reference) in `rollout_data`, by `args.advantage_estimator`.

    All three are per sample over the response tokens that this context-parallel rank holds. `kl` is 0 unless
    `args.kl_coef` shapes the rewards with it.

    Args:
        rollout_data: rewards, loss_masks, total_lengths, response_lengths; log_probs or rollout_log_probs, and
            ref_log_probs, when `args.kl_coef` is not 0; values with the estimator ppo; teacher_log_probs with
            `args.use_opd`, which also sets `opd_reverse_kl`.

    Raises:
        ValueError: unknown estimator, or values or log-probs that it needs are missing.
    """
    cp = current_context_parallel()
    rollout_data["kl"] = kl = _rollout_kl(args, rollout_data, cp)
    if args.custom_advantage_function_path:
        load_function(args.custom_advantage_function_path)(args, rollout_data)
        _check_custom(args, rollout_data, len(kl))
        return
    rewards = torch.tensor([float(r) for r in rollout_data["rewards"]], dtype=torch.float32)
    match args.advantage_estimator:
        case "grpo" | "gspo" | "cispo" | "rloo":
            advantages = returns = get_grpo_returns(rewards, kl)
        case "ppo":
            advantages, returns = _ppo(args, rollout_data, rewards, kl, cp)
        case "reinforce_plus_plus":
            advantages = returns = _reinforce_plus_plus(args, rollout_data, rewards, kl, cp)
        case "reinforce_plus_plus_baseline":
            advantages = returns = get_reinforce_plus_plus_baseline_advantages(rewards, kl, args.kl_coef)
        case other:
            raise ValueError(f"unknown advantage estimator {other!r}")
    if args.use_opd:
        advantages = apply_opd_kl_to_advantages(args, rollout_data, advantages, _student_log_probs(args, rollout_data))
    if args.normalize_advantages:
        advantages = _whiten(advantages, rollout_data, cp)
    rollout_data["advantages"], rollout_data["returns"] = advantages, returns


def _rollout_kl(args: Namespace, rollout_data: dict[str, Any], cp: ContextParallel) -> list[torch.Tensor]:
    masks, totals, lengths = (rollout_data[k] for k in ("loss_masks", "total_lengths", "response_lengths"))
    if args.kl_coef == 0:
        zeros = [torch.zeros(len(m), dtype=torch.float32, device=m.device) for m in masks]
        return _slices(zeros, totals, lengths, cp)
    log_probs, ref_log_probs = _student_log_probs(args, rollout_data), rollout_data.get("ref_log_probs")
    if log_probs is None or ref_log_probs is None:
        name = _student_column(args)
        raise ValueError(f"--kl-coef {args.kl_coef} needs {name} and ref_log_probs in the rollout data")
    flat = compute_approx_kl(torch.cat(log_probs), torch.cat(ref_log_probs), args.kl_loss_type)
    return list(flat.split([len(x) for x in log_probs]))


def _student_column(args: Namespace) -> str:
    return "rollout_log_probs" if args.use_rollout_logprobs else "log_probs"


def _student_log_probs(args: Namespace, rollout_data: dict[str, Any]) -> list[torch.Tensor] | None:
    return rollout_data.get(_student_column(args))


def apply_opd_kl_to_advantages(
    args: Namespace,
    rollout_data: dict[str, Any],
    advantages: list[torch.Tensor],
    student_log_probs: list[torch.Tensor] | None,
) -> list[torch.Tensor]:
    """On-policy distillation: A_t - args.opd_kl_coef * (log pi_student - log pi_teacher) at the sampled tokens.

    The difference is the one-sample estimate of the reverse KL; it is set as `rollout_data["opd_reverse_kl"]`.
    Sources: Agarwal et al., arXiv:2306.13649 §3; Thinking Machines Lab, "On-Policy Distillation" (2025).

    Args:
        rollout_data: teacher_log_probs, per sample, local response tokens.
        advantages, student_log_probs: per sample, local response tokens.

    Raises:
        ValueError: the student's or the teacher's log-probs are missing, or differ in length.
    """
    teacher = rollout_data.get("teacher_log_probs")
    if teacher is None or student_log_probs is None:
        missing = "teacher_log_probs" if teacher is None else _student_column(args)
        raise ValueError(f"--use-opd needs {missing} in the rollout data")
    reverse_kl = []
    for position, (own, other) in enumerate(zip(student_log_probs, teacher, strict=True)):
        if own.shape != other.shape:
            raise ValueError(f"sample {position} has {len(own)} log-probs, but {len(other)} of the teacher")
        reverse_kl.append(own - other)
    rollout_data["opd_reverse_kl"] = reverse_kl
    return [a - args.opd_kl_coef * kl for a, kl in zip(advantages, reverse_kl, strict=True)]


def _slices(
    full: Sequence[torch.Tensor], totals: Sequence[int], lengths: Sequence[int], cp: ContextParallel
) -> list[torch.Tensor]:
    """This rank's part of each sample's whole-response values."""
    parts = (slice_log_prob_with_cp(x, total, n, cp) for x, total, n in zip(full, totals, lengths, strict=True))
    return [torch.as_tensor(part) for part in parts]


def _reinforce_plus_plus(
    args: Namespace, rollout_data: dict[str, Any], rewards: torch.Tensor, kl: list[torch.Tensor], cp: ContextParallel
) -> list[torch.Tensor]:
    """Returns need the tokens after a token, so they are computed on whole responses and sliced again."""
    totals, lengths = rollout_data["total_lengths"], rollout_data["response_lengths"]
    full_kl = all_gather_samples_with_cp(kl, totals, lengths, cp)
    full = get_reinforce_plus_plus_returns(rewards, full_kl, rollout_data["loss_masks"], args.kl_coef, args.gamma)
    return _slices(full, totals, lengths, cp)


def _ppo(
    args: Namespace, rollout_data: dict[str, Any], rewards: torch.Tensor, kl: list[torch.Tensor], cp: ContextParallel
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(advantages, returns) by GAE on whole responses, sliced again: the end of a response, where its reward belongs,
    lies on any context-parallel rank."""
    if rollout_data.get("values") is None:
        raise ValueError("--advantage-estimator ppo needs the critic's values in the rollout data")
    totals, lengths, masks = (rollout_data[k] for k in ("total_lengths", "response_lengths", "loss_masks"))
    values = all_gather_samples_with_cp(rollout_data["values"], totals, lengths, cp)
    full_kl = all_gather_samples_with_cp(kl, totals, lengths, cp)
    token_rewards = get_ppo_token_rewards(rewards, full_kl, masks, args.kl_coef)
    advantages, returns = get_advantages_and_returns_batch(values, token_rewards, args.gamma, args.lambd, masks)
    return _slices(advantages, totals, lengths, cp), _slices(returns, totals, lengths, cp)


def _whiten(advantages: list[torch.Tensor], rollout_data: dict[str, Any], cp: ContextParallel) -> list[torch.Tensor]:
    """Zero mean and unit variance over the unmasked tokens of all data- and context-parallel ranks."""
    from slime.utils.distributed_utils import distributed_masked_whiten

    masks = _slices(rollout_data["loss_masks"], rollout_data["total_lengths"], rollout_data["response_lengths"], cp)
    group: dist.ProcessGroup | None = None
    if dist.is_initialized():
        from megatron.core import parallel_state as mpu

        group = mpu.get_data_parallel_group(with_context_parallel=True)
    whitened = distributed_masked_whiten(torch.cat(advantages), torch.cat(masks), group)
    return list(whitened.split([len(a) for a in advantages]))


def _check_custom(args: Namespace, rollout_data: dict[str, Any], samples: int) -> None:
    for key in ("advantages", "returns"):
        got = rollout_data.get(key)
        if got is None or len(got) != samples:
            raise ValueError(
                f"--custom-advantage-function-path {args.custom_advantage_function_path} must set "
                f"rollout_data[{key!r}] to a list of {samples} tensors"
            )
