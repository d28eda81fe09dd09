"""Keeps what the driver's terminal has not shown yet. `slime.observability.console_renderer` draws it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from slime.observability.trackers.base import Metrics, Tracker

MAX_EVENTS = 10_000


@dataclass(frozen=True)
class MetricsEvent:
    """The metrics of one log call."""

    step_key: str
    step: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class ProgressEvent:
    """How far a named piece of work has come."""

    name: str
    done: int
    total: int
    started: float  # seconds since the epoch
    closed: bool = False
    postfix: dict[str, float | str] = field(default_factory=dict)


@dataclass(frozen=True)
class ConsoleUpdate:
    """What happened since the last drain. Of each progress only the latest state is kept."""

    metrics: list[MetricsEvent]
    progress: list[ProgressEvent]
    notices: list[str]


class ConsoleTracker(Tracker):
    """A bounded buffer between the workers and the driver's terminal; it has one reader."""

    name = "console"

    def __init__(self) -> None:
        self._events: deque[MetricsEvent] = deque()
        self._progress: dict[str, ProgressEvent] = {}
        self._notices: list[str] = []
        self._dropped = 0

    def log(self, metrics: Metrics, step_key: str, step: int) -> None:
        self._events.append(MetricsEvent(step_key, step, dict(metrics)))
        if len(self._events) > MAX_EVENTS:
            self._events.popleft()
            self._dropped += 1

    def progress(self, event: ProgressEvent) -> None:
        self._progress[event.name] = event

    def notice(self, text: str) -> None:
        """Something that the person at the terminal must see."""
        self._notices.append(text)

    def drain(self) -> ConsoleUpdate:
        if self._dropped:
            self._notices.append(f"{self._dropped} sets of metrics were not shown here; the other trackers have them")
        update = ConsoleUpdate(list(self._events), list(self._progress.values()), self._notices)
        self._events.clear()
        self._progress.clear()
        self._notices, self._dropped = [], 0
        return update

    def close(self) -> None:
        """Nothing to release: the driver drains once more after the hub has closed."""

    def location(self) -> str:
        return "this terminal"
