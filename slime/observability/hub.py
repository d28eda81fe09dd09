"""The one owner of a run's trackers.

Every process of a run sends its metrics here, so each tracker has one writer: one W&B run, one event file, one jsonl.
This module and what it imports stay free of torch: the process that runs it is small.
"""

from __future__ import annotations

import threading
import traceback

from slime.observability.trackers.base import Metrics, Tracker
from slime.observability.trackers.console import ConsoleTracker, ConsoleUpdate, ProgressEvent
from slime.observability.tracking_config import TrackingConfig


class MetricsHub:
    """Opens the trackers of `config` and hands them each set of metrics.

    Used as a Ray actor, where calls come one by one, or within a process without Ray, where any thread may call.
    """

    def __init__(self, config: TrackingConfig) -> None:
        self._console = ConsoleTracker()
        self._trackers = [self._console, *_open_trackers(config)]
        self._finished = False
        self._lock = threading.Lock()

    def locations(self) -> dict[str, str]:
        """Tracker name → where its metrics are."""
        return {tracker.name: tracker.location() for tracker in self._trackers if tracker is not self._console}

    def wandb_run_id(self) -> str | None:
        return next((tracker.run_id for tracker in self._trackers if tracker.run_id is not None), None)

    def log(self, metrics: Metrics, step_key: str, step: int) -> None:
        """Hand `metrics` to every tracker.

        A tracker that fails is switched off with a notice at the driver's terminal: a full disk or a lost connection
        must not end a training run, nor hide the metrics from the other trackers.
        """
        with self._lock:
            if self._finished:
                raise RuntimeError(f"metrics for {step_key} {step} came after the run's trackers were closed")
            for tracker in list(self._trackers):
                try:
                    tracker.log(metrics, step_key, step)
                except Exception:
                    self._trackers.remove(tracker)
                    self._console.notice(
                        f"tracker {tracker.name} failed and is off from now on:\n{traceback.format_exc()}"
                    )

    def progress(self, event: ProgressEvent) -> None:
        with self._lock:
            self._console.progress(event)

    def drain(self) -> ConsoleUpdate:
        """What the driver's terminal has not shown yet."""
        with self._lock:
            return self._console.drain()

    def finish(self) -> None:
        """Flush and close every tracker; repeating it does nothing."""
        with self._lock:
            if self._finished:
                return
            self._finished = True
            for tracker in self._trackers:
                try:
                    tracker.close()
                except Exception:
                    self._console.notice(f"tracker {tracker.name} failed to close:\n{traceback.format_exc()}")


def _open_trackers(config: TrackingConfig) -> list[Tracker]:
    trackers: list[Tracker] = []
    if config.jsonl_path is not None:
        from slime.observability.trackers.jsonl import JsonlTracker

        trackers.append(JsonlTracker(config.jsonl_path))
    if config.tensorboard_dir is not None:
        from slime.observability.trackers.tensorboard import TensorboardTracker

        trackers.append(TensorboardTracker(config.tensorboard_dir))
    if config.wandb is not None:
        from slime.observability.trackers.wandb import WandbTracker

        trackers.append(WandbTracker(config.wandb, config.run_config))
    return trackers
