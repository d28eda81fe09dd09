"""Pure functions behind the metrics: statistics, pass@k, repetition, step numbers."""

from __future__ import annotations

import bz2
import gzip
import lzma
import math
import statistics
import zlib
from argparse import Namespace
from collections.abc import Sequence
from typing import Any, Literal

REPETITION_WINDOW = 10_000  # characters
REPETITION_RATIO = 10.0


def dict_add_prefix(d: dict[str, Any], prefix: str) -> dict[str, Any]:
    """`d` with `prefix` in front of each key."""
    return {f"{prefix}{key}": value for key, value in d.items()}


def compute_statistics(values: Sequence[float]) -> dict[str, float]:
    """mean, median, max and min of `values`; {} when there are none."""
    if not values:
        return {}
    return {
        "mean": statistics.fmean(values),
        "median": float(statistics.median(values)),
        "max": max(values),
        "min": min(values),
    }


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of the chance that at least one of `k` answers is right: 1 - C(n-c, k) / C(n, k).

    Source: Chen et al. 2021, "Evaluating Large Language Models Trained on Code", eq. 1.
    """
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def compute_pass_rate_of_groups(groups: Sequence[Sequence[float]]) -> dict[str, float]:
    """pass@k for k = 1, 2, 4, ... up to the smallest group's size, averaged over groups (one per prompt).

    An answer is right when its reward is exactly 1. With one answer per prompt there is nothing to estimate: {}.
    """
    smallest = min((len(group) for group in groups), default=0)
    if smallest <= 1:
        return {}
    correct = [(len(group), sum(reward == 1 for reward in group)) for group in groups]
    ks = [2**i for i in range(smallest.bit_length()) if 2**i <= smallest]
    return {f"pass@{k}": statistics.fmean(pass_at_k(n, c, k) for n, c in correct) for k in ks}


def compute_pass_rate(flat_rewards: list[float], group_size: int, num_groups: int | None = None) -> dict[str, float]:
    """pass@k of rewards that stand group by group, `group_size` answers each.

    Raises:
        ValueError: the rewards are not `num_groups` (default: as many as fit) whole groups.
    """
    if num_groups is not None and len(flat_rewards) != num_groups * group_size:
        raise ValueError(f"{len(flat_rewards)} rewards are not {num_groups} groups of {group_size}")
    return compute_pass_rate_of_groups(groups_of(flat_rewards, group_size))


def groups_of(flat_rewards: Sequence[float], group_size: int) -> list[Sequence[float]]:
    """Rewards that stand group by group, in groups of `group_size`.

    Raises:
        ValueError: they are not whole groups.
    """
    if len(flat_rewards) % group_size:
        raise ValueError(
            f"{len(flat_rewards)} rewards are not {len(flat_rewards) // group_size} groups of {group_size}"
        )
    return [flat_rewards[i : i + group_size] for i in range(0, len(flat_rewards), group_size)]


def compression_ratio(
    data: str | bytes,
    *,
    encoding: str = "utf-8",
    algorithm: Literal["zlib", "gzip", "bz2", "lzma"] = "zlib",
    level: int = 9,
) -> float:
    """Size of `data` over its compressed size; 0 for empty data, infinity never occurs. lzma has no `level`."""
    raw = data.encode(encoding, errors="surrogatepass") if isinstance(data, str) else data
    if not raw:
        return 0.0
    compress = {
        "zlib": lambda: zlib.compress(raw, level),
        "gzip": lambda: gzip.compress(raw, level),
        "bz2": lambda: bz2.compress(raw, level),
        "lzma": lambda: lzma.compress(raw),
    }
    return len(raw) / len(compress[algorithm]())


def has_repetition(text: str) -> bool:
    """Whether a long answer ends in a loop: its last 10,000 characters shrink to under a tenth."""
    if len(text) <= REPETITION_WINDOW:
        return False
    return compression_ratio(text[-REPETITION_WINDOW:]) > REPETITION_RATIO


def compute_rollout_step(args: Namespace, rollout_id: int) -> int:
    """The value of `rollout/step` and `eval/step`: the rollout id, or optimiser steps with
    `--wandb-always-use-train-step` (rollout_id x samples per rollout // global batch size)."""
    if not getattr(args, "wandb_always_use_train_step", False):
        return rollout_id
    return rollout_id * args.rollout_batch_size * args.n_samples_per_prompt // args.global_batch_size
