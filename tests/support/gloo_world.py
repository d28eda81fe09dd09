"""A set of processes that form one gloo world and run one function after another, each in a fresh Megatron state."""

from __future__ import annotations

import multiprocessing
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.support import gloo_worker

START_TIMEOUT_S = 120.0
GRACE_AFTER_ERROR_S = 3.0


class GlooWorldError(AssertionError):
    """A rank raised, died or did not finish in time; the message has every failed rank's traceback."""


class GlooWorld:
    """`size` ranks that stay up between calls: starting them costs seconds, a call milliseconds."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._connections: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 120.0, **kwargs: Any) -> list[Any]:
        """Call `function(*args, **kwargs)` on every rank; the results by rank.

        `function` is a module-level function of a test module; it finds its rank with `torch.distributed`. Arguments
        and results are pickled by value. Before each call all generators are seeded alike, and Megatron's groups,
        random states and calculators are gone.

        Raises:
            GlooWorldError: also ends the processes, since the ranks no longer agree; the next call starts new ones.
        """
        started = time.monotonic()
        if not self._processes:
            self._start()
            timeout += START_TIMEOUT_S
        job = pickle.dumps((list(sys.path), function.__module__, function.__qualname__, pickle.dumps((args, kwargs))))
        for connection in self._connections:
            connection.send_bytes(job)
        answers = self._collect(started + timeout)
        failures = [f"rank {rank}: {answer[1]}" for rank, answer in enumerate(answers) if answer[0] != "ok"]
        if failures:
            self.close()
            raise GlooWorldError(f"{function.__qualname__} on {self.size} ranks:\n" + "\n".join(failures))
        return [pickle.loads(answer[1]) for answer in answers]

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()  # they have nothing to save
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        rendezvous = Path(tempfile.mkdtemp(prefix="gloo-")) / "store"
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=gloo_worker.main, args=(rank, self.size, str(rendezvous), theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def _collect(self, deadline: float) -> list[tuple[str, Any]]:
        answers: list[tuple[str, Any]] = [("late", "did not finish in time")] * self.size
        waiting = dict(enumerate(self._connections))
        while waiting and time.monotonic() < deadline:
            ready = multiprocessing.connection.wait(list(waiting.values()), timeout=0.5)
            for rank, connection in list(waiting.items()):
                if connection not in ready:
                    continue
                answers[rank] = self._receive(rank)
                del waiting[rank]
                if answers[rank][0] != "ok":  # the others may wait for this rank in a collective
                    deadline = min(deadline, time.monotonic() + GRACE_AFTER_ERROR_S)
        return answers

    def _receive(self, rank: int) -> tuple[str, Any]:
        try:
            return pickle.loads(self._connections[rank].recv_bytes())
        except EOFError:
            self._processes[rank].join(timeout=5.0)
            return "died", f"ended with status {self._processes[rank].exitcode}"
