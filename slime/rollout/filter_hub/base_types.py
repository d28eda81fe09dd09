"""The verdict of a dynamic sampling filter, and the count of what it dropped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class DynamicFilterOutput:
    """Whether a group is kept.

    Attributes:
        reason: names the drop in metrics.
        keep_when_insufficient: keep it nevertheless when dropping it would leave too few groups in flight.
    """

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


def call_dynamic_filter(fn: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> DynamicFilterOutput:
    """Call a filter; no filter keeps everything, a bare bool is wrapped.

    Raises:
        TypeError: the filter returned something else.
    """
    if fn is None:
        return DynamicFilterOutput(keep=True)
    output = fn(*args, **kwargs)
    if isinstance(output, DynamicFilterOutput):
        return output
    if isinstance(output, bool):
        return DynamicFilterOutput(keep=output)
    raise TypeError(
        f"dynamic sampling filter {fn.__module__}.{fn.__qualname__} returned {type(output).__name__};"
        " expected DynamicFilterOutput or bool"
    )


def should_drop_dynamic_filter_output(
    output: DynamicFilterOutput, *, remaining_batch_size: int, target_data_size: int
) -> bool:
    """Whether to drop the group: the filter says so, and it isn't one to fall back on while groups are short.

    Args:
        remaining_batch_size: groups that are kept or still in flight, this one included.
        target_data_size: groups that the batch needs.
    """
    if output.keep:
        return False
    return not (output.keep_when_insufficient and remaining_batch_size <= target_data_size)


class MetricGatherer:
    """Counts dropped groups by reason."""

    def __init__(self) -> None:
        self.drops: Counter[str] = Counter()

    def on_dynamic_filter_drop(self, reason: str | None) -> None:
        """Count one dropped group."""
        self.drops[reason or "unnamed"] += 1

    def collect(self) -> dict[str, int]:
        """`rollout/dynamic_filter/drop_{reason}` → number of groups."""
        return {f"rollout/dynamic_filter/drop_{reason}": count for reason, count in self.drops.items()}
