"""One JSON object per log call, in a file that a crash can't truncate by more than the line being written."""

from __future__ import annotations

import json
import time
from pathlib import Path

from slime.observability.trackers.base import Metrics, Tracker


class JsonlTracker(Tracker):
    """Appends `{"time": ..., "step_key": ..., "step": ..., <metric>: <value>, ...}` per call.

    Values that are not finite are written as Python's json does (`NaN`, `Infinity`), so that a diverged run shows.
    """

    name = "jsonl"

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("a", encoding="utf-8")

    def log(self, metrics: Metrics, step_key: str, step: int) -> None:
        record = {"time": round(time.time(), 3), "step_key": step_key, "step": step, **metrics}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def location(self) -> str:
        return str(self._path)
