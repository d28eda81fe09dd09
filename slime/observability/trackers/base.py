"""The seam between the metrics hub and the places where metrics are kept."""

from __future__ import annotations

import abc
from collections.abc import Mapping

Metrics = Mapping[str, float]


class Tracker(abc.ABC):
    """Keeps metrics somewhere. Lives in the hub's process and is called from one thread."""

    name: str
    run_id: str | None = None
    """What the tracker's service calls the run, where it has names of its own."""

    @abc.abstractmethod
    def log(self, metrics: Metrics, step_key: str, step: int) -> None:
        """Keep `metrics`, which belong to `step` on the axis `step_key` (e.g. "train/step")."""

    @abc.abstractmethod
    def close(self) -> None:
        """Write out everything and release the files; nothing may be logged afterwards."""

    @abc.abstractmethod
    def location(self) -> str:
        """Where a person finds the metrics."""
