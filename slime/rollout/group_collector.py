"""Gathers finished groups into a batch: dynamic filter, progress, counts."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from typing import Any

from slime.observability.progress import Progress
from slime.rollout.base_types import SampleGroup
from slime.rollout.filter_hub.base_types import MetricGatherer, call_dynamic_filter, should_drop_dynamic_filter_output
from slime.rollout.hook_errors import hook_errors
from slime.rollout.rm_hub import grader_metrics, warn_without_marker
from slime.rollout.rm_hub.failures import require_some_graded
from slime.utils.misc import iter_leaves, load_function
from slime.utils.types import Sample


class GroupCollector:
    """The groups of one rollout as they come in.

    Attributes:
        groups: kept, at most `target`.
        surplus: kept by the filter, but more than `target`.
        all_groups: everything that was finished, dropped groups included.
    """

    def __init__(self, args: Any) -> None:
        self.args = args
        self.target: int = args.rollout_batch_size
        self.groups: list[SampleGroup] = []
        self.surplus: list[SampleGroup] = []
        self.all_groups: list[SampleGroup] = []
        self._filter = load_function(args.dynamic_sampling_filter_path) if args.dynamic_sampling_filter_path else None
        self._drops = MetricGatherer()
        self._rewards: list[float] = []
        self._counts: Counter[str] = Counter()
        self._progress = Progress(args, "rollout", self.target)

    @property
    def full(self) -> bool:
        return len(self.groups) >= self.target

    def add(self, group: SampleGroup, remaining_batch_size: int) -> bool:
        """Whether the group stays: in the batch, or as surplus.

        Raises:
            RuntimeError: the grading of every sample failed, or the filter drops more than
                --dynamic-sampling-max-drops lets it; says what for.
        """
        self.all_groups.append(group)
        if len(self.all_groups) == self.target:
            require_some_graded(list(iter_leaves(self.all_groups)))
        with hook_errors(self.args.dynamic_sampling_filter_path, group):
            output = call_dynamic_filter(self._filter, self.args, group)
        if should_drop_dynamic_filter_output(
            output, remaining_batch_size=remaining_batch_size, target_data_size=self.target
        ):
            self._drops.on_dynamic_filter_drop(output.reason)
            self._check_drops()
            return False
        if self.full:
            self.surplus.append(group)
        else:
            self.groups.append(group)
            self._progress.update(1, **self._postfix(group))
        return True

    def count(self, name: str) -> None:
        """Count something under a metric's name."""
        self._counts[name] += 1

    def close(self) -> None:
        """Take the progress bar away."""
        self._progress.close()

    def metrics(self, unused: int) -> dict[str, int]:
        """Counts of dropped, retried and unused groups and of failed gradings, where there are any.

        Args:
            unused: groups that were begun and are neither in the batch nor kept for later.
        """
        samples = list(iter_leaves(self.all_groups))
        warn_without_marker(self.args, samples)
        counts = {"rollout/unused_groups": unused} if unused else {}
        return self._drops.collect() | dict(self._counts) | counts | grader_metrics(samples)

    def _postfix(self, group: SampleGroup) -> dict[str, float]:
        rewards = (_reward(self.args, sample) for sample in iter_leaves(group))
        self._rewards += [reward for reward in rewards if reward is not None]
        return {"reward": round(statistics.fmean(self._rewards), 4)} if self._rewards else {}

    def _check_drops(self) -> None:
        dropped = self._drops.drops.total()
        if dropped > self.args.dynamic_sampling_max_drops * self.target:
            reasons = ", ".join(f"{count} x {reason}" for reason, count in self._drops.drops.most_common())
            raise RuntimeError(
                f"{self.args.dynamic_sampling_filter_path} dropped {dropped} groups while the batch has"
                f" {len(self.groups)} of {self.target}: {reasons}. The bound is --dynamic-sampling-max-drops"
                f" {self.args.dynamic_sampling_max_drops} per group of the batch"
            )


def _reward(args: Any, sample: Sample) -> float | None:
    """The reward as a number, for display; None where it isn't one."""
    reward = sample.reward.get(args.reward_key) if isinstance(sample.reward, dict) else sample.reward
    return float(reward) if isinstance(reward, (int, float)) and math.isfinite(reward) else None
