"""Gradings that failed: as samples carry them, as they are counted, warned about, and end a run."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from functools import cache

from slime.utils.types import Sample

logger = logging.getLogger(__name__)

FAILURE_KEY = "grader_failure"  # in a sample's metadata: "timeout" or "error"
FAILURE_REASON_KEY = "grader_failure_reason"  # what the grader said
WARNING_INTERVAL_S = 30.0


def grader_failures(samples: Iterable[Sample]) -> dict[str, int]:
    """`grader_timeout` and `grader_error` with their counts, where not zero."""
    failures = [sample.metadata[FAILURE_KEY] for sample in samples if FAILURE_KEY in (sample.metadata or {})]
    return {f"grader_{kind}": failures.count(kind) for kind in ("timeout", "error") if kind in failures}


def require_some_graded(samples: list[Sample]) -> None:
    """Raise RuntimeError with the last reason when the grading of every sample failed: rewards would mean nothing."""
    if not samples or any(FAILURE_KEY not in (sample.metadata or {}) for sample in samples):
        return
    last = samples[-1]
    reason = last.metadata.get(FAILURE_REASON_KEY, last.metadata[FAILURE_KEY])
    raise RuntimeError(
        f"grading failed for all {len(samples)} samples of the rollout; the last, {last.name()}: {reason}"
    )


def throttled_warning(message: str) -> None:
    """Warn at most twice a minute; the next warning says how many were held back."""
    _warnings().warn(message)


class _Warnings:
    def __init__(self) -> None:
        self._next, self._held = 0.0, 0

    def warn(self, message: str) -> None:
        now = time.monotonic()
        if now < self._next:
            self._held += 1
            return
        more = f" ({self._held} more since the last such warning)" if self._held else ""
        logger.warning("%s%s", message, more)
        self._next, self._held = now + WARNING_INTERVAL_S, 0


@cache
def _warnings() -> _Warnings:
    return _Warnings()
