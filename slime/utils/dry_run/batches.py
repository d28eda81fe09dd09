"""Batch arithmetic: prompts to samples to optimiser steps to micro-batches."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

from slime.utils.dp_schedule import build_dp_schedule


@dataclass(frozen=True)
class Batches:
    """What one rollout is cut into.

    Attributes:
        total_steps: optimiser steps of the whole run; None where the prompts decide how many rollouts there are.
        longest_sample: tokens of the longest sample that the limits allow, None without a limit.
        micro_batches_per_step: of each data-parallel rank, when every sample is that long; None where that is unknown.
        tokens_per_micro_batch: most tokens of one micro-batch on one device; None where that is unknown.
    """

    prompts_per_rollout: int
    samples_per_prompt: int
    samples_per_rollout: int
    samples_per_step: int
    steps_per_rollout: int
    num_rollouts: int | None
    total_steps: int | None
    data_parallel_size: int
    samples_per_rank_and_step: int
    longest_sample: int | None
    micro_batches_per_step: int | None
    tokens_per_micro_batch: int | None


def plan_batches(args: Namespace) -> Batches | None:
    """The arithmetic of a rollout; None for a run that doesn't train."""
    if args.debug_rollout_only or args.num_rollout == 0:
        return None
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    steps = samples // args.global_batch_size
    rollouts = None if args.num_rollout is None else args.num_rollout - (args.start_rollout_id or 0)
    longest = longest_sample(args)
    return Batches(
        prompts_per_rollout=args.rollout_batch_size,
        samples_per_prompt=args.n_samples_per_prompt,
        samples_per_rollout=samples,
        samples_per_step=args.global_batch_size,
        steps_per_rollout=steps,
        num_rollouts=rollouts,
        total_steps=None if rollouts is None else rollouts * steps,
        data_parallel_size=args.data_parallel_size,
        samples_per_rank_and_step=args.global_batch_size // args.data_parallel_size,
        longest_sample=longest,
        micro_batches_per_step=_micro_batches(args, longest),
        tokens_per_micro_batch=tokens_per_micro_batch(args),
    )


def longest_sample(args: Namespace) -> int | None:
    """Tokens of the longest sample: the context limit, or the longest prompt and response; None without limits."""
    prompt, response, context = (
        args.rollout_max_prompt_len,
        args.rollout_max_response_len,
        args.rollout_max_context_len,
    )
    together = prompt + response if prompt and response else None
    limits = [limit for limit in (context, together) if limit]
    return min(limits, default=None)


def tokens_per_micro_batch(args: Namespace) -> int | None:
    """Most tokens that one device takes at once, padding included; None where nothing limits it.

    A sample longer than `--max-tokens-per-gpu` allows makes a micro-batch of its own.
    """
    longest, ranks = longest_sample(args), args.context_parallel_size
    if args.use_dynamic_batch_size:
        tokens = max(args.max_tokens_per_gpu, -(-(longest or 0) // ranks))
    elif longest is None:
        return None
    else:
        tokens = -(-args.micro_batch_size * longest // ranks)
    multiple = args.data_pad_size_multiplier * args.tensor_model_parallel_size
    return -(-tokens // multiple) * multiple


def _micro_batches(args: Namespace, longest: int | None) -> int | None:
    """By the schedule that training uses, on one step of samples that all have the longest length."""
    if longest is None and args.use_dynamic_batch_size:
        return None
    layout = {
        "dp_size": args.data_parallel_size,
        "cp_size": args.context_parallel_size,
        "vpp_size": args.virtual_pipeline_model_parallel_size or 1,
        "microbatch_group_size_per_vp_stage": args.microbatch_group_size_per_vp_stage
        or args.pipeline_model_parallel_size,
    }
    count = args.global_batch_size
    schedule = build_dp_schedule(
        args, layout, [longest or 1] * count, global_batch_size=count, rollout_indices=list(range(count))
    )
    return schedule.num_microbatches[0]
