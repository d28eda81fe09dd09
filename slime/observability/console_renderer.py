"""Shows a run on the driver's terminal: drains the metrics hub in a thread and prints what a person wants to see."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from statistics import fmean

from slime.observability.console_lines import eval_line, progress_bar, progress_line, rollout_line
from slime.observability.hub_client import HubClient
from slime.observability.terminal import Terminal
from slime.observability.trackers.console import ConsoleUpdate, MetricsEvent, ProgressEvent

POLL_S = 0.2
PLAIN_PROGRESS_S = 10.0


class RolloutLines:
    """Collects what several processes report about a rollout until its step line can be printed.

    A rollout is complete when the trainer's times arrive (its last report), or, where nothing trains
    (`trains=False`), with the manager's report. Several optimiser steps of one rollout are averaged.
    """

    def __init__(self, trains: bool, num_rollout: int | None = None) -> None:
        self._num_rollout = num_rollout
        self._last_metric = "perf/train_time" if trains else "perf/rollout_time"
        self._metrics: dict[int, dict[str, float]] = defaultdict(dict)
        self._train_steps: list[dict[str, float]] = []

    def add(self, event: MetricsEvent) -> list[str]:
        """Take one report; the lines that are ready now, in order of their rollouts."""
        if event.step_key == "eval/step":
            return [eval_line(event.step, event.metrics)]
        if event.step_key == "train/step":
            self._train_steps.append(event.metrics)
            return []
        if event.step_key != "rollout/step":
            return []
        self._metrics[event.step].update(event.metrics)
        if self._last_metric not in event.metrics:
            return []
        self._metrics[event.step].update(self._mean_of_train_steps())
        return self._lines_up_to(event.step)

    def rest(self) -> list[str]:
        """The lines of rollouts that never completed."""
        return self._lines_up_to(max(self._metrics, default=-1))

    def _lines_up_to(self, last: int) -> list[str]:
        ready = sorted(step for step in self._metrics if step <= last)
        return [rollout_line(step, self._metrics.pop(step), self._num_rollout) for step in ready]

    def _mean_of_train_steps(self) -> dict[str, float]:
        steps, self._train_steps = self._train_steps, []
        names = {name for step in steps for name in step}
        return {name: fmean(step[name] for step in steps if name in step) for name in names}


class ConsoleRenderer:
    """Owns the thread. `close` shows what is left; it never outlives the run."""

    def __init__(self, client: HubClient, terminal: Terminal, *, trains: bool, num_rollout: int | None = None) -> None:
        self._client = client
        self._terminal = terminal
        self._lines = RolloutLines(trains, num_rollout)
        self._active: dict[str, ProgressEvent] = {}
        self._printed_at: dict[str, float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="console-renderer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread. The caller has closed the hub, so one more drain gets all that is left."""
        self._stop.set()
        self._thread.join()
        self._show(self._client.drain())
        for line in self._lines.rest():
            self._terminal.line(line)
        self._terminal.status("")

    def abandon(self) -> None:
        """Stop without a last drain: the hub can't be reached."""
        self._stop.set()
        self._thread.join()
        self._terminal.status("")

    def _run(self) -> None:
        while not self._stop.wait(POLL_S):
            try:
                update = self._client.drain()
            except Exception as error:  # the run goes on without its display; a lost hub also fails the next log()
                self._terminal.line(f"the metrics hub does not answer, no more progress here: {error}")
                return
            self._show(update)

    def _show(self, update: ConsoleUpdate) -> None:
        for notice in update.notices:
            self._terminal.line(notice)
        for event in update.metrics:
            for line in self._lines.add(event):
                self._terminal.line(line)
        for progress in update.progress:
            if progress.closed:
                self._active.pop(progress.name, None)
                self._printed_at.pop(progress.name, None)
            else:
                self._active[progress.name] = progress
        self._show_progress(time.time())

    def _show_progress(self, now: float) -> None:
        self._terminal.status("  ".join(progress_bar(event, now) for event in self._active.values()))
        if self._terminal.is_tty:
            return
        for event in self._active.values():
            last = self._printed_at.setdefault(event.name, event.started)
            if now - last >= PLAIN_PROGRESS_S:
                self._terminal.line(progress_line(event, now))
                self._printed_at[event.name] = now
