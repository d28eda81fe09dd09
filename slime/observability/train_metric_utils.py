"""Metrics that trainers report: of each optimiser step, of the rollout data they train on, and of their speed.

Every rank calls these functions; ranks that hold the loss (last pipeline stage, first tensor rank) contribute, and one
of them logs.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from slime.observability import logging_utils
from slime.observability.metric_utils import compute_pass_rate, compute_rollout_step, dict_add_prefix
from slime.observability.timer import Timer
from slime.utils.flops_utils import calculate_fwd_flops
from slime.utils.types import RolloutBatch

if TYPE_CHECKING:
    import torch

TOKEN_COLUMNS = (
    "log_probs", "ref_log_probs", "rollout_log_probs", "teacher_log_probs", "values", "advantages", "returns", "kl",
    "entropy", "ref_entropy", "opd_reverse_kl",
)  # fmt: skip
SAMPLE_COLUMNS = ("response_lengths", "total_lengths", "rewards", "truncated", "round_number")
# Numbers that name or arrange samples: their means say nothing.
NOT_METRICS = (
    "tokens", "loss_masks", "rollout_mask_sums", "partition", "sample_indices", "rollout_ids", "micro_batch_indices",
    "num_microbatches", "global_batch_sizes", "raw_reward", "local_raw_reward", "trimmed_samples", "tis_weight_means",
)  # fmt: skip

Reduced = dict[str, float]


def reduce_train_step_metrics(
    losses_reduced: list[dict[str, Any]],
    *,
    calculate_per_token_loss: bool,
    step_global_batch_size: int,
    cp_size: int,
    dp_with_cp_group: Any,
) -> Reduced:
    """One value per metric of an optimiser step, from this rank's micro-batches and all ranks of DP x CP.

    Args:
        losses_reduced: per micro-batch {"keys": names, "values": tensor [1 + len(keys)]}; values[0] is the loss's
            normaliser (the micro-batch's token count in per-token mode), the rest are sums over samples.
        step_global_batch_size: rollouts in this step, the denominator unless in per-token mode.
        cp_size: context-parallel ranks; each counts all tokens of its samples, hence the factor in per-token mode.

    Raises:
        ValueError: micro-batches report different metrics.
    """
    import torch.distributed as dist

    keys = list(losses_reduced[0]["keys"])
    for micro_batch in losses_reduced:
        if list(micro_batch["keys"]) != keys or micro_batch["values"].numel() != len(keys) + 1:
            raise ValueError(f"micro-batches of one step report different metrics: {keys} and {micro_batch['keys']}")
    total = sum(micro_batch["values"].detach().double() for micro_batch in losses_reduced)
    dist.all_reduce(total, group=dp_with_cp_group)
    normaliser, *sums = total.tolist()
    factor = cp_size / max(normaliser, 1.0) if calculate_per_token_loss else 1.0 / step_global_batch_size
    return {key: value * factor for key, value in zip(keys, sums, strict=True)}


def train_step_metrics(
    args: Namespace,
    reduced: Mapping[str, float],
    *,
    rollout_id: int,
    step_id: int,
    steps_per_rollout: int,
    global_batch_size: int,
    grad_norm: float | None,
    learning_rates: Sequence[float],
    role: str = "actor",
) -> dict[str, float]:
    """What is logged under "train/step" for one optimiser step. `grad_norm` None (a skipped step) is logged as nan."""
    prefix = "train/" if role == "actor" else f"train/{role}-"
    metrics = dict_add_prefix(dict(reduced), prefix)
    metrics[f"{prefix}grad_norm"] = float("nan") if grad_norm is None else grad_norm
    metrics[f"{prefix}global_batch_size"] = global_batch_size
    metrics |= {f"{prefix}lr-pg_{index}": rate for index, rate in enumerate(learning_rates)}
    metrics["train/step"] = rollout_id * steps_per_rollout + step_id
    return metrics


def rollout_log_metric_contribution(
    per_rank_reducer_sum: float, *, cp_size: int, num_rollouts_in_rollout: int, dp_size: int
) -> float:
    """This rank's share of a per-token column; the mean of all shares over DP x CP is the mean over rollouts.

    Args:
        per_rank_reducer_sum: the loss's reducer on this rank: per sample the sum over local tokens / mask total.
        dp_size: data-parallel ranks, without context parallelism.
    """
    return per_rank_reducer_sum * cp_size * dp_size / num_rollouts_in_rollout


def gather_and_reduce_log_dict(
    log_dict: Mapping[str, float | tuple[float, float]], *, dp_size: int, dp_src_rank: int, dp_group: Any
) -> Reduced | None:
    """Bring the ranks' dicts together on `dp_src_rank` (a global rank); None on the others.

    A number is averaged over ranks; a pair (sum, count) becomes total sum / total count, so ranks with more samples
    weigh more, and is left out where no rank has anything to count.

    Raises:
        ValueError: ranks report different metrics.
    """
    shards = _gather_objects(dict(log_dict), dp_size, dp_src_rank, dp_group)
    if shards is None:
        return None
    if any(shard.keys() != log_dict.keys() for shard in shards):
        raise ValueError(f"ranks report different metrics: {[sorted(shard) for shard in shards]}")
    reduced: Reduced = {}
    for key, value in log_dict.items():
        if not isinstance(value, tuple):
            reduced[key] = sum(shard[key] for shard in shards) / dp_size
            continue
        count = sum(shard[key][1] for shard in shards)
        if count:
            reduced[key] = sum(shard[key][0] for shard in shards) / count
    return reduced


def gather_log_data(
    metric_name: str, args: Namespace, rollout_id: int, log_dict: Mapping[str, float | tuple[float, float]]
) -> Reduced | None:
    """Reduce `log_dict` over DP x CP and log it as `{metric_name}/...`; the logged dict on the rank that logs."""
    reduced = gather_and_reduce_log_dict(log_dict, **_dp_with_cp())
    return None if reduced is None else _log_rollout_step(metric_name, args, rollout_id, reduced)


def log_rollout_data(rollout_id: int, args: Namespace, rollout_data: RolloutBatch) -> None:
    """Log the mean of every numeric column as `rollout/{column}`, reduced over all samples of all ranks."""
    if not _holds_loss():
        return
    metrics: dict[str, float | tuple[float, float]] = {}
    for name, column in rollout_data.items():
        if name in TOKEN_COLUMNS and column is not None:
            metrics[name] = _token_column_mean(column, rollout_data, args)
        elif name not in NOT_METRICS and _is_numeric(column):
            metrics[name] = (float(sum(column)), len(column))
    if "trimmed_samples" in rollout_data:
        metrics["trimmed_samples"] = float(rollout_data["trimmed_samples"])
    if _is_numeric(rollout_data.get("raw_reward")) and getattr(args, "loss_type", None) != "sft_loss":
        metrics["raw_reward"] = fmean(rollout_data["raw_reward"])  # whole on every rank
    if getattr(args, "log_correct_samples", False):
        metrics |= correct_sample_metrics(rollout_data)
    gather_log_data("rollout", args, rollout_id, metrics)


def correct_sample_metrics(rollout_data: RolloutBatch) -> dict[str, tuple[float, float]]:
    """(sum, count) of lengths over this rank's samples whose raw reward is 1.

    `raw_reward` covers all ranks; `partition` says which of its entries are this rank's samples.
    """
    local = rollout_data.get("local_raw_reward")
    if local is None:
        local = [rollout_data["raw_reward"][position] for position in rollout_data["partition"]]
    metrics = {}
    for column in ("response_lengths", "total_lengths"):
        lengths = [length for length, reward in zip(rollout_data[column], local, strict=True) if reward == 1]
        metrics[f"correct_{column}"] = (float(sum(lengths)), float(len(lengths)))
    return metrics


def log_multi_turn_data(rollout_id: int, args: Namespace, rollout_data: RolloutBatch) -> None:
    """Log `multi_turn/`: response lengths with and without the tokens that were not sampled, and numbers of turns."""
    if not _holds_loss():
        return
    columns = {
        "raw": [int(length) for length in rollout_data["response_lengths"]],
        "sampled": [int(mask.sum()) for mask in rollout_data["loss_masks"]],
        "rounds": [int(number) for number in rollout_data.get("round_number") or []],
    }
    shards = _gather_objects(columns, **_dp_with_cp())
    if shards is None:
        return
    raw, sampled, rounds = ([value for shard in shards for value in shard[name]] for name in columns)
    metrics = _extremes(raw, "raw_response_length/response_length_")
    limit = args.rollout_max_response_len
    metrics["raw_response_length/response_length_clip_ratio"] = fmean(length >= limit for length in raw)
    metrics |= _extremes(sampled, "wo_obs_response_length/response_length_")
    if rounds:
        metrics |= _extremes(rounds, "multi_turn_metric/round_number_")
    _log_rollout_step("multi_turn", args, rollout_id, metrics)


def log_passrate(rollout_id: int, args: Namespace, rollout_data: RolloutBatch) -> None:
    """Log `passrate/pass@k` of a replayed dump. In other runs the rollout manager logs it: it knows which samples
    answer one prompt, also when rollouts fan out."""
    if not _is_main_rank() or not getattr(args, "load_debug_rollout_data", None):
        return
    rates = compute_pass_rate(list(rollout_data["raw_reward"]), args.n_samples_per_prompt)
    if rates:
        _log_rollout_step("passrate", args, rollout_id, rates)


def log_perf_data(
    rollout_id: int, args: Namespace, extra_metrics: Mapping[str, float] | None = None, role: str = "actor"
) -> None:
    """Log this process's timers as `perf/{timer}_time` (a critic's as `perf/critic-{timer}_time`), with throughput,
    and reset them. The last report of a rollout.

    `Timer().seq_lens` holds the lengths of all samples of the rollout (of all ranks).
    """
    timer = Timer()
    if _is_main_rank():
        import torch.distributed as dist

        metrics = perf_metrics(args, timer.log_dict(), timer.seq_lens, dist.get_world_size())
        metrics = {**metrics, **(extra_metrics or {})}
        _log_rollout_step("perf", args, rollout_id, dict_add_prefix(metrics, "" if role == "actor" else f"{role}-"))
    timer.reset()


def perf_metrics(args: Namespace, seconds: Mapping[str, float], seq_lens: Sequence[int], world_size: int) -> Reduced:
    """Times and throughput, without the prefix. TFLOPS are per device; a training step costs three forward passes."""
    metrics = {f"{name}_time": value for name, value in seconds.items()}
    tflops = calculate_fwd_flops(seq_lens, args) / world_size / 1e12 if seq_lens else 0.0
    for name, passes in (("log_probs", 1), ("ref_log_probs", 1), ("actor_train", 3)):
        if tflops and seconds.get(name):
            metrics[f"{name}_tflops"] = passes * tflops / seconds[name]
    if seq_lens and seconds.get("actor_train"):
        metrics["actor_train_tok_per_s"] = sum(seq_lens) / seconds["actor_train"]
    if "train" in seconds and "train_wait" in seconds:
        metrics["step_time"] = seconds["train"] + seconds["train_wait"]
        metrics["wait_time_ratio"] = seconds["train_wait"] / metrics["step_time"]
    return metrics


def _token_column_mean(column: Sequence[torch.Tensor], rollout_data: RolloutBatch, args: Namespace) -> float:
    """Mean over rollouts of the mean over their trained tokens, as the loss reduces (surface 6.6)."""
    import torch
    from megatron.core import parallel_state

    from slime.backends.megatron_utils.cp_utils import get_sum_of_sample_mean

    masks = rollout_data["loss_masks"]
    reducer = get_sum_of_sample_mean(
        rollout_data["total_lengths"], rollout_data["response_lengths"], masks, rollout_data.get("rollout_mask_sums")
    )
    values = torch.cat([tensor.detach().float().to(masks[0].device) for tensor in column])
    return rollout_log_metric_contribution(
        float(reducer(values)),
        cp_size=parallel_state.get_context_parallel_world_size(),
        num_rollouts_in_rollout=sum(rollout_data["global_batch_sizes"]),
        dp_size=parallel_state.get_data_parallel_world_size(with_context_parallel=False),
    )


def _is_numeric(column: Any) -> bool:
    return isinstance(column, list | tuple) and bool(column) and all(isinstance(v, int | float) for v in column)


def _extremes(values: Sequence[float], prefix: str) -> Reduced:
    return {f"{prefix}mean": fmean(values), f"{prefix}max": max(values), f"{prefix}min": min(values)}


def _log_rollout_step(metric_name: str, args: Namespace, rollout_id: int, metrics: Mapping[str, float]) -> Reduced:
    prefixed = dict_add_prefix(dict(metrics), f"{metric_name}/")
    prefixed["rollout/step"] = compute_rollout_step(args, rollout_id)
    logging_utils.log(args, prefixed, step_key="rollout/step")
    return prefixed


def _gather_objects(value: Any, dp_size: int, dp_src_rank: int, dp_group: Any) -> list[Any] | None:
    import torch.distributed as dist

    shards: list[Any] | None = [None] * dp_size if dist.get_rank() == dp_src_rank else None
    dist.gather_object(value, shards, dst=dp_src_rank, group=dp_group)
    return shards


def _dp_with_cp() -> dict[str, Any]:
    """The ranks that hold different parts of the rollout, as a gloo group: metrics never touch the device."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group_gloo(with_context_parallel=True)
    return {"dp_size": dist.get_world_size(group), "dp_src_rank": dist.get_global_rank(group, 0), "dp_group": group}


def _holds_loss() -> bool:
    """Whether this rank has what forward passes add to the data, and speaks for its tensor-parallel group."""
    from megatron.core import parallel_state

    last_stage = parallel_state.get_pipeline_model_parallel_world_size() - 1
    return (
        parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_pipeline_model_parallel_rank() == last_stage
    )


def _is_main_rank() -> bool:
    from slime.backends.megatron_utils.initialize import is_megatron_main_rank

    return is_megatron_main_rank()
