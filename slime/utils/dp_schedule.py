"""Which data-parallel rank trains which samples, in which optimiser step and micro-batch.

The layout of a step is made globally, so that every rank runs the same number of non-empty micro-batches (pipeline
stages and collectives need that) whatever the lengths of the samples.
"""

from __future__ import annotations

import itertools
import logging
import math
from typing import Any, NamedTuple

from slime.utils.flops_utils import calculate_fwd_flops
from slime.utils.misc import group_by
from slime.utils.seqlen_balancing import (
    balanced_pack,
    expand_bins_by_splitting,
    first_fit_pack,
    get_seqlen_balanced_partitions,
)

logger = logging.getLogger(__name__)

# Room beyond the least that is needed when micro-batches are packed by FLOPs: 5 % keeps them within 3 % of even.
_SLACK = 1.05


class DpSchedule(NamedTuple):
    """The layout of one rollout's training.

    Attributes:
        partitions: [rank][i], the global positions of the samples that a data-parallel rank holds.
        micro_batch_indices: [rank][micro-batch][j], positions within the rank's partition, all steps one after
            another.
        num_microbatches: [step], the same for every rank.
        global_batch_sizes: [step], the number of rollout executions (distinct rollout ids) in the step.
    """

    partitions: list[list[int]]
    micro_batch_indices: list[list[list[int]]]
    num_microbatches: list[int]
    global_batch_sizes: list[int]


def build_dp_schedule(
    args: Any,
    train_parallel_config: dict[str, Any],
    total_lengths: list[int],
    *,
    global_batch_size: int,
    rollout_indices: list[int],
) -> DpSchedule:
    """Lay out the samples over optimiser steps, data-parallel ranks and micro-batches.

    Samples with the same rollout index belong to one rollout execution and stay in one step. A step takes
    `global_batch_size` executions in first-seen order; executions that don't fill a step are trimmed, with a warning,
    and appear in no partition.

    Args:
        args: reads use_dynamic_batch_size, max_tokens_per_gpu, micro_batch_size, balance_data, balance_by_flops and,
            for the latter two, the architecture (see `calculate_fwd_flops`).
        train_parallel_config: dp_size, cp_size, vpp_size, microbatch_group_size_per_vp_stage.
        total_lengths: tokens of each sample, prompt and response.
        global_batch_size: rollout executions per step.
        rollout_indices: the rollout id of each sample.

    Raises:
        ValueError: no step can be filled, a step has fewer samples than micro-batches are needed, or a fixed
            micro-batch size does not divide the step.
    """
    if len(total_lengths) != len(rollout_indices):
        raise ValueError(f"{len(total_lengths)} lengths but {len(rollout_indices)} rollout ids")
    steps = _split_into_steps(rollout_indices, global_batch_size)
    dp_size = train_parallel_config["dp_size"]
    partitions: list[list[int]] = [[] for _ in range(dp_size)]
    micro_batch_indices: list[list[list[int]]] = [[] for _ in range(dp_size)]
    num_microbatches = []
    for step, samples in enumerate(steps):
        bins = _pack_step(args, train_parallel_config, samples, total_lengths, step)
        num_microbatches.append(len(bins) // dp_size)
        for rank, rank_bins in enumerate(_assign_bins(args, bins, dp_size, total_lengths)):
            for items in rank_bins:
                start = len(partitions[rank])
                partitions[rank] += items
                micro_batch_indices[rank].append(list(range(start, start + len(items))))
    return DpSchedule(partitions, micro_batch_indices, num_microbatches, [global_batch_size] * len(steps))


def _split_into_steps(rollout_indices: list[int], global_batch_size: int) -> list[list[int]]:
    """[step][i], global positions; warns of what fills no step."""
    executions = list(group_by(range(len(rollout_indices)), lambda i: rollout_indices[i]).values())
    num_steps = len(executions) // global_batch_size
    if num_steps == 0:
        raise ValueError(
            f"the rollout has {len(executions)} rollout executions, fewer than --global-batch-size "
            f"{global_batch_size}: not one step can be made"
        )
    trimmed = executions[num_steps * global_batch_size :]
    if trimmed:
        logger.warning(
            "%d samples of %d rollout executions are not trained: they don't fill a step of %d",
            sum(map(len, trimmed)), len(trimmed), global_batch_size,
        )  # fmt: skip
    steps = (executions[i * global_batch_size : (i + 1) * global_batch_size] for i in range(num_steps))
    return [[i for execution in step for i in execution] for step in steps]


def count_trimmed(schedule: DpSchedule, num_samples: int) -> int:
    """How many of `num_samples` samples the schedule leaves out."""
    return num_samples - sum(map(len, schedule.partitions))


def _pack_step(
    args: Any, parallel: dict[str, Any], samples: list[int], total_lengths: list[int], step: int
) -> list[list[int]]:
    """Non-empty bins (lists of global positions), their number a multiple of what the layout needs."""
    vpp_group = parallel["microbatch_group_size_per_vp_stage"] if (parallel.get("vpp_size") or 1) > 1 else 1
    multiple = parallel["dp_size"] * vpp_group
    if len(samples) < multiple:
        raise ValueError(
            f"step {step} has {len(samples)} samples, but the layout needs at least {multiple} "
            f"(data parallel {parallel['dp_size']} x micro-batch group {vpp_group}): raise --global-batch-size"
        )
    if not args.use_dynamic_batch_size:
        size = args.micro_batch_size
        if len(samples) % (size * multiple):
            raise ValueError(
                f"step {step} has {len(samples)} samples, which --micro-batch-size {size} does not divide into a "
                f"multiple of {multiple} micro-batches: change --micro-batch-size or use --use-dynamic-batch-size"
            )
        return [samples[i : i + size] for i in range(0, len(samples), size)]
    lengths = [total_lengths[i] for i in samples]
    cap = args.max_tokens_per_gpu * parallel["cp_size"]
    if args.balance_by_flops:
        bins = _balanced_bins(_flops(args, lengths), lengths, cap, multiple)
    else:
        bins = first_fit_pack(lengths, cap)
    return [[samples[i] for i in items] for items in _fit_bin_count(bins, multiple, lengths, step)]


def _balanced_bins(flops: list[int], lengths: list[int], cap: int, multiple: int) -> list[list[int]]:
    """Packed for the number of bins that there will be in the end, which is more even than adding some later."""
    needed = math.ceil(_SLACK * sum(lengths) / cap)
    planned = -(-needed // multiple) * multiple
    bins = balanced_pack(flops, lengths, cap, planned)
    if len(bins) > planned:
        bins = balanced_pack(flops, lengths, cap, -(-len(bins) // multiple) * multiple)
    return bins


def _fit_bin_count(bins: list[list[int]], multiple: int, lengths: list[int], step: int) -> list[list[int]]:
    """Make the number of bins a multiple: more by splitting or, where the samples don't suffice for that, fewer."""
    up = -(-len(bins) // multiple) * multiple
    if up <= len(lengths):
        return expand_bins_by_splitting(bins, up, lengths)
    down = up - multiple
    logger.warning(
        "step %d: %d samples can't fill %d micro-batches, so %d take more than --max-tokens-per-gpu allows",
        step, len(lengths), up, down,
    )  # fmt: skip
    return get_seqlen_balanced_partitions(lengths, down, equal_size=False)


def _assign_bins(args: Any, bins: list[list[int]], dp_size: int, total_lengths: list[int]) -> list[list[list[int]]]:
    """The bins of each rank, the same number for all."""
    if not args.balance_data:
        return [bins[rank::dp_size] for rank in range(dp_size)]
    flops = iter(_flops(args, [total_lengths[i] for items in bins for i in items]))
    weights = [sum(itertools.islice(flops, len(items))) for items in bins]
    parts = get_seqlen_balanced_partitions(weights, dp_size, equal_size=True)
    return [[bins[b] for b in part] for part in parts]


def _flops(args: Any, lengths: list[int]) -> list[int]:
    of_length = {n: calculate_fwd_flops([n], args) for n in set(lengths)}
    return [of_length[n] for n in lengths]
