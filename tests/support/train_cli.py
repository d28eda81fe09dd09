"""Runs `train.py` as a user would: in a process of its own, with a deadline, and with its metrics read back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from tests.support.leftovers import (
    RUN_MARKER,
    SESSION_MARKER,
    describe,
    kill,
    marked_processes,
    wait_until_none,
    work_in_cluster,
)
from tests.support.tiny_model import REPOSITORY

TAIL_LINES = 80


@dataclass(frozen=True)
class TrainResult:
    """How a run ended."""

    returncode: int
    output: str
    log_dir: Path

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """Every log call of the run, in order (see the jsonl tracker)."""
        path = self.log_dir / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def series(self, name: str) -> dict[int, float]:
        """Step → value of one metric."""
        return {record["step"]: record[name] for record in self.metrics if name in record}

    def check(self) -> TrainResult:
        """Itself; AssertionError with the end of the output unless the run succeeded."""
        assert self.returncode == 0, f"train.py ended with status {self.returncode}:\n{self.tail()}"
        return self

    def tail(self, lines: int = TAIL_LINES) -> str:
        return "\n".join(self.output.splitlines()[-lines:])


class RunningTrain:
    """A run in progress, its terminal being a pipe."""

    def __init__(self, command: list[str], env: Mapping[str, str], log_dir: Path, own_cluster: bool) -> None:
        self.log_dir = log_dir
        self._own_cluster = own_cluster
        self._marker = uuid.uuid4().hex
        self._lines: list[str] = []
        self._news = threading.Condition()
        self._began = time.time()
        self.process = subprocess.Popen(
            # Test runs in the background ignore SIGINT, and their children would.
            ["env", "--default-signal=INT", *command],
            cwd=REPOSITORY,
            env={**env, RUN_MARKER: self._marker},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, text: str, timeout: float) -> str:
        """The first line with `text`; AssertionError when the run ends or `timeout` seconds pass without it."""
        deadline = time.monotonic() + timeout
        seen = 0
        with self._news:
            while True:
                for line in self._lines[seen:]:
                    if text in line:
                        return line
                seen = len(self._lines)
                ended = not self._reader.is_alive()
                assert not ended, f"the run ended without printing {text!r}:\n{self._tail()}"
                assert time.monotonic() < deadline, f"no {text!r} within {timeout:.0f} s:\n{self._tail()}"
                self._news.wait(0.5)

    def interrupt(self) -> None:
        """What Ctrl-C does: SIGINT to the whole foreground process group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def kill(self) -> None:
        """SIGKILL the driver alone."""
        self.process.kill()

    def wait(self, timeout: float) -> TrainResult:
        """The result; a run that does not end in time is killed and fails the test with the end of its output."""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGTERM)
            wait_until_none(self.leftovers, 20.0)
            kill(self.leftovers())
            raise AssertionError(f"train.py did not end within {timeout:.0f} s:\n{self._tail()}") from None
        self._reader.join(timeout=10.0)  # a leftover that holds the pipe must not hang the test
        return TrainResult(self.process.returncode, "".join(self._lines), self.log_dir)

    def leftovers(self) -> list[psutil.Process]:
        """Processes of this run that are still there (in a shared cluster: all work begun since)."""
        if self._own_cluster:
            return marked_processes(RUN_MARKER, self._marker)
        return work_in_cluster(os.environ[SESSION_MARKER], self._began)

    def assert_nothing_left(self, timeout: float = 20.0) -> None:
        """No process of the run outlives it by more than `timeout` seconds."""
        left = wait_until_none(self.leftovers, timeout)
        if left:
            text = describe(left)
            kill(left)
            raise AssertionError(f"processes that the run left behind:\n{text}")

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self._lines.append(line)
                self._news.notify_all()

    def _tail(self) -> str:
        return "".join(self._lines[-TAIL_LINES:])


class TrainCli:
    """Starts runs; `folder` gets one log directory per run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runs: list[RunningTrain] = []

    def start(
        self,
        *flags: str,
        script: str = "train.py",
        own_cluster: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> RunningTrain:
        """Start `python {script} {flags}`. It joins the cluster of RAY_ADDRESS, unless it is to start its own."""
        full_env = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", **(env or {})}
        if own_cluster:
            full_env["RAY_ADDRESS"] = "local"
        log_dir = self._folder / f"run-{len(self._runs)}"
        command = [sys.executable, script, *flags, "--log-dir", str(log_dir)]
        self._runs.append(RunningTrain(command, full_env, log_dir, own_cluster))
        return self._runs[-1]

    def run(self, *flags: str, timeout: float, **options: Any) -> TrainResult:
        """Start, wait, and check that no process is left. The result may be a failure: see `TrainResult.check`."""
        run = self.start(*flags, **options)
        result = run.wait(timeout)
        run.assert_nothing_left()
        return result

    def close(self) -> None:
        """End runs that a failing test left."""
        for run in self._runs:
            if run.process.poll() is None:
                run.process.send_signal(signal.SIGTERM)
                wait_until_none(run.leftovers, 20.0)
                kill(run.leftovers())
