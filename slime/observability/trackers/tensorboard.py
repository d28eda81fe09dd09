"""TensorBoard event files, written without torch or TensorFlow."""

from __future__ import annotations

from slime.observability.trackers.base import Metrics, Tracker


class TensorboardTracker(Tracker):
    """One writer and one event file per run (see `slime.observability.hub`); flushed after each call."""

    name = "tensorboard"

    def __init__(self, directory: str) -> None:
        from tensorboard.summary import Writer

        self._directory = directory
        self._writer = Writer(directory)

    def log(self, metrics: Metrics, step_key: str, step: int) -> None:
        for tag, value in metrics.items():
            if tag != step_key:
                self._writer.add_scalar(tag, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def location(self) -> str:
        return self._directory
