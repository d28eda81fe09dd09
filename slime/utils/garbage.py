"""Python's garbage collector in a process that handles many long answers."""

from __future__ import annotations

import gc

YOUNG_OBJECTS, YOUNG_RUNS, MIDDLE_RUNS = 100_000, 20, 20


def collect_rarely() -> None:
    """Let 100,000 new objects pass between collections instead of 700, and leave out what exists already.

    An engine's answer is decoded into a list per token, so an answer of 1,000 tokens starts a collection or two that
    go through everything alive and find nothing: 60 % of the time of a rollout (`benchmarks/rollout_overhead.py`).
    """
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, YOUNG_RUNS, MIDDLE_RUNS)
