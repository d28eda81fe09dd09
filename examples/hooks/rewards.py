"""Rewards, and what becomes of them."""

from __future__ import annotations

from argparse import Namespace
from collections import defaultdict
from statistics import fmean
from typing import Any

from slime.utils.types import Sample


async def exact_match(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """1 where the last line of the response is the label. With --group-rm, take and return lists instead."""
    lines = sample.response.strip().splitlines()
    return float(bool(lines) and lines[-1].strip() == sample.label)


def centred_by_group(args: Namespace, samples: list[Sample]) -> tuple[list[float], list[float]]:
    """(the rewards as they are logged, each less the mean of its group), as long as `samples`."""
    raw = [float(sample.get_reward_value(args)) for sample in samples]
    groups: dict[int | None, list[float]] = defaultdict(list)
    for sample, reward in zip(samples, raw, strict=True):
        groups[sample.group_index].append(reward)
    centred = [reward - fmean(groups[sample.group_index]) for sample, reward in zip(samples, raw, strict=True)]
    return raw, centred
