"""Metrics of a rollout and of an evaluation, computed from their samples in the rollout manager."""

from __future__ import annotations

import math
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from slime.observability import logging_utils
from slime.observability.metric_utils import (
    compute_pass_rate_of_groups,
    compute_rollout_step,
    compute_statistics,
    dict_add_prefix,
    groups_of,
    has_repetition,
)
from slime.observability.sglang_trace_attrs import request_perf_metrics
from slime.rollout.rm_hub.failures import grader_failures
from slime.utils.data import get_source
from slime.utils.misc import load_function
from slime.utils.types import Sample

EQUAL_REWARDS = 1e-6
Metrics = dict[str, Any]


def log_rollout_data(
    rollout_id: int,
    args: Namespace,
    samples: list[Sample],
    rollout_extra_metrics: Mapping[str, Any] | None,
    rollout_time: float,
) -> None:
    """Log a rollout of `rollout_time` seconds: `rollout/...`, `perf/...` and the rollout function's own metrics.

    Nothing is logged when samples come from a dump, or when `--custom-rollout-log-function-path` says that it did.
    """
    if getattr(args, "load_debug_rollout_data", None):
        return
    custom = getattr(args, "custom_rollout_log_function_path", None)
    if custom and load_function(custom)(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
        return
    metrics = dict(rollout_extra_metrics or {})
    metrics |= dict_add_prefix(compute_metrics_from_samples(args, samples), "rollout/")
    metrics |= dict_add_prefix(_source_metrics(args, samples), "rollout/source/")
    metrics |= dict_add_prefix(compute_perf_metrics_from_samples(args, samples, rollout_time), "perf/")
    if getattr(args, "log_passrate", False):
        metrics |= dict_add_prefix(_pass_rate(args, samples), "passrate/")
    if getattr(args, "debug_rollout_only", False) and samples:  # else the trainer logs it
        metrics["rollout/raw_reward"] = fmean(_raw_rewards(args, samples))
    metrics["rollout/step"] = compute_rollout_step(args, rollout_id)
    logging_utils.log(args, metrics, step_key="rollout/step")


def log_eval_rollout_data(
    rollout_id: int,
    args: Namespace,
    data: Mapping[str, Mapping[str, Any]],
    extra_metrics: Mapping[str, Any] | None = None,
) -> Metrics:
    """Log an evaluation and return its metrics.

    Args:
        data: dataset name → {"rewards": numbers, "truncated": bools, "samples": Samples (optional)}.

    Raises:
        ValueError: a reward is not a finite number; the message names dataset and position.
    """
    custom = getattr(args, "custom_eval_rollout_log_function_path", None)
    if custom and load_function(custom)(rollout_id, args, data, extra_metrics):
        return {}
    metrics = dict(extra_metrics or {})
    for name, result in data.items():
        metrics |= _eval_metrics(args, name, result)
    metrics["eval/step"] = compute_rollout_step(args, rollout_id)
    logging_utils.log(args, metrics, step_key="eval/step")
    return metrics


def compute_metrics_from_samples(
    args: Namespace, samples: Sequence[Sample], rewards: Sequence[float] | None = None
) -> Metrics:
    """The `rollout/` set (without the prefix) of a flat list of samples; {} for none.

    `rewards` are the samples' raw rewards where they don't follow from `--reward-key` (evaluation has its own key).
    """
    if not samples:
        return {}
    rewards = _raw_rewards(args, samples) if rewards is None else rewards
    metrics = dict_add_prefix(compute_statistics([s.effective_response_length for s in samples]), "response_len/")
    metrics |= _zero_std_metrics(args, samples, rewards)
    metrics |= _engine_counter_metrics(samples)
    metrics |= _reward_category_metrics(args, samples)
    metrics["repetition_frac"] = fmean(has_repetition(s.response) for s in samples)
    metrics["truncated_ratio"] = fmean(s.status == Sample.Status.TRUNCATED for s in samples)
    return metrics


def compute_perf_metrics_from_samples(args: Namespace, samples: Sequence[Sample], rollout_time: float) -> Metrics:
    """The rollout's `perf/` set (without the prefix). Token rates per device need `rollout_num_gpus` > 0."""
    metrics: Metrics = {"rollout_time": rollout_time}
    if not samples or rollout_time <= 0:
        return metrics
    waits = [s.non_generation_time for s in samples]
    if max(waits) > 0:
        metrics |= dict_add_prefix(compute_statistics(waits), "non_generation_time/")
    num_gpus = getattr(args, "rollout_num_gpus", None)
    for kind, lengths in (
        ("", [s.response_length for s in samples]),
        ("effective_", [s.effective_response_length for s in samples]),
    ):
        if num_gpus:
            metrics[f"{kind}tokens_per_gpu_per_sec"] = sum(lengths) / rollout_time / num_gpus
        metrics |= dict_add_prefix(_longest_sample_metrics(lengths, waits, rollout_time), f"longest_{kind}sample_")
    return metrics | request_perf_metrics(samples)


def _source_metrics(args: Namespace, samples: Sequence[Sample]) -> Metrics:
    """Mean reward and share of the samples of each source of `--prompt-data`, where there are several."""
    by_source: dict[str, list[float]] = defaultdict(list)
    for sample, reward in zip(samples, _raw_rewards(args, samples), strict=True):
        if (source := get_source(sample)) is not None:
            by_source[source].append(reward)
    metrics: Metrics = {f"{name}/raw_reward": fmean(rewards) for name, rewards in by_source.items()}
    return metrics | {f"{name}/share": len(rewards) / len(samples) for name, rewards in by_source.items()}


def _longest_sample_metrics(lengths: Sequence[int], waits: Sequence[float], rollout_time: float) -> Metrics:
    """Speed of the sample that a rollout waits for; several of the same length share their mean waiting time."""
    longest = max(lengths)
    metrics = {"tokens_per_sec": longest / rollout_time}
    if max(waits) > 0:
        wait = fmean(wait for wait, length in zip(waits, lengths, strict=True) if length == longest)
        metrics["non_generation_time"] = wait
        if wait < rollout_time:
            metrics["tokens_per_sec_without_non_generation"] = longest / (rollout_time - wait)
    return metrics


def _zero_std_metrics(args: Namespace, samples: Sequence[Sample], rewards: Sequence[float]) -> Metrics:
    """How many groups got one reward throughout, per reward (one decimal): they teach GRPO-like estimators nothing."""
    if getattr(args, "advantage_estimator", None) == "ppo":
        return {}
    counts: Counter[float] = Counter()
    for group in _reward_groups(samples, rewards):
        if len(group) > 1 and max(group) - min(group) <= EQUAL_REWARDS:
            counts[round(group[0], 1) + 0.0] += 1  # + 0.0 turns -0.0 into 0.0
    return {f"zero_std/count_{reward:g}": count for reward, count in sorted(counts.items())}


def _engine_counter_metrics(samples: Sequence[Sample]) -> Metrics:
    """Speculative decoding, prefix cache and top-p counters, each only where the engine reported it."""
    metrics: Metrics = {}
    drafted = sum(s.spec_info.spec_draft_token_num for s in samples)
    verified = sum(s.spec_info.spec_verify_ct for s in samples)
    if drafted:
        metrics["spec_accept_rate"] = sum(s.spec_info.spec_accept_token_num for s in samples) / drafted
    if verified:
        metrics["spec_accept_length"] = sum(s.spec_info.completion_token_num for s in samples) / verified
    prompt_tokens = sum(s.prefix_cache_info.total_prompt_tokens for s in samples)
    if prompt_tokens:
        cached = sum(s.prefix_cache_info.cached_tokens for s in samples)
        metrics["prefix_cache_hit_rate"] = cached / prompt_tokens
        metrics["avg_cached_tokens_per_sample"] = cached / len(samples)
    offsets = [s.rollout_top_p_token_offsets for s in samples if s.rollout_top_p_token_offsets is not None]
    tokens = sum(len(o) - 1 for o in offsets)
    if tokens:
        metrics["top_p_kept_vocab_per_token"] = sum(o[-1] - o[0] for o in offsets) / tokens
    return metrics


def _reward_category_metrics(args: Namespace, samples: Sequence[Sample]) -> Metrics:
    """Share of samples per value of `--log-reward-category`, a key of the reward dicts."""
    key = getattr(args, "log_reward_category", None)
    if not key:
        return {}
    counts = Counter(s.reward[key] for s in samples if isinstance(s.reward, dict) and key in s.reward)
    return {f"error_cat/{category}": count / len(samples) for category, count in counts.items()}


def _eval_metrics(args: Namespace, name: str, result: Mapping[str, Any]) -> Metrics:
    rewards = result["rewards"]
    for position, reward in enumerate(rewards):
        if not isinstance(reward, int | float) or not math.isfinite(reward):
            hint = "; set --eval-reward-key" if isinstance(reward, dict) else ""
            raise ValueError(f"eval dataset {name!r}: reward {position} is not a finite number but {reward!r}{hint}")
    if not rewards:
        raise ValueError(f"eval dataset {name!r} has no rewards")
    metrics: Metrics = {f"eval/{name}": fmean(rewards)}
    samples = result.get("samples")
    if samples:
        metrics |= dict_add_prefix(compute_metrics_from_samples(args, samples, rewards), f"eval/{name}/")
        metrics |= dict_add_prefix(grader_failures(samples), f"eval/{name}/")
    if result.get("truncated"):
        metrics[f"eval/{name}-truncated_ratio"] = fmean(result["truncated"])
    if getattr(args, "log_passrate", False):
        groups = _eval_groups(args, name, rewards, samples or [])
        metrics |= dict_add_prefix(compute_pass_rate_of_groups(groups) | _mean_at_n(groups), f"eval/{name}-")
    return metrics


def _eval_groups(
    args: Namespace, name: str, rewards: Sequence[float], samples: Sequence[Sample]
) -> Sequence[Sequence[float]]:
    """Rewards by prompt: by the samples' groups where they are known (an answer may fan out), else by count."""
    if len(samples) == len(rewards) and all(sample.group_index is not None for sample in samples):
        return _reward_groups(samples, rewards)
    return groups_of(rewards, _answers_per_prompt(args, name))


def _mean_at_n(groups: Sequence[Sequence[float]]) -> dict[str, float]:
    """The mean reward under the name `mean@n`, where each prompt was answered n > 1 times."""
    sizes = {len(group) for group in groups}
    if len(sizes) != 1 or sizes == {1}:
        return {}
    return {f"mean@{sizes.pop()}": fmean(fmean(group) for group in groups)}


def _answers_per_prompt(args: Namespace, name: str) -> int:
    """The dataset's own number of answers per prompt, which may differ from the command line's."""
    for dataset in getattr(args, "eval_datasets", None) or []:
        if dataset.name == name and dataset.n_samples_per_eval_prompt is not None:
            return dataset.n_samples_per_eval_prompt
    return args.n_samples_per_eval_prompt


def _pass_rate(args: Namespace, samples: Sequence[Sample]) -> Metrics:
    return compute_pass_rate_of_groups(_reward_groups(samples, _raw_rewards(args, samples)))


def _reward_groups(samples: Sequence[Sample], rewards: Sequence[float]) -> list[list[float]]:
    """Rewards by prompt. Siblings that one rollout fanned out into count once, with their mean."""
    groups: dict[Any, dict[Any, list[float]]] = defaultdict(lambda: defaultdict(list))
    for position, (sample, reward) in enumerate(zip(samples, rewards, strict=True)):
        group = sample.group_index if sample.group_index is not None else ("ungrouped", position)
        rollout = sample.rollout_id if sample.rollout_id is not None else ("single", position)
        groups[group][rollout].append(reward)
    return [[fmean(siblings) for siblings in rollouts.values()] for rollouts in groups.values()]


def _raw_rewards(args: Namespace, samples: Sequence[Sample]) -> list[float]:
    """The rewards before normalisation: `metadata["raw_reward"]` where a sample has it. No reward counts as 0 here;
    training refuses such a sample."""
    values = [(s.metadata or {}).get("raw_reward", s.get_reward_value(args)) for s in samples]
    return [0.0 if value is None else float(value) for value in values]
