"""Gradings that failed, as samples carry them."""

from __future__ import annotations

from collections.abc import Iterable

from slime.utils.types import Sample

FAILURE_KEY = "grader_failure"  # in a sample's metadata: "timeout" or "error"


def grader_failures(samples: Iterable[Sample]) -> dict[str, int]:
    """`grader_timeout` and `grader_error` with their counts, where not zero."""
    failures = [sample.metadata[FAILURE_KEY] for sample in samples if FAILURE_KEY in (sample.metadata or {})]
    return {f"grader_{kind}": failures.count(kind) for kind in ("timeout", "error") if kind in failures}
