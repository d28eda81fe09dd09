"""Sets of gloo processes for tests: a session-wide pool that many layouts share, and fresh ranks for a single call.

All are forked from one server that has torch and Megatron loaded, so a rank costs milliseconds, not seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.support import gloo_worker

PRELOAD = ["tests.support.gloo_preload"]
START_TIMEOUT_S = 120.0
GRACE_AFTER_ERROR_S = 3.0


class GlooWorldError(AssertionError):
    """A rank raised, died or did not finish in time; the message has every failed rank's traceback."""


class GlooWorld:
    """`size` ranks that form one gloo world and stay up between calls.

    As a context manager it ends its processes on leaving.

    Args:
        join: whether the ranks form a world before the first call; without it a call does that itself.
        share_groups: calls get the same group for the same set of ranks, see `gloo_worker`; not for calls that
            destroy groups.
    """

    def __init__(self, size: int, *, join: bool = True, share_groups: bool = True) -> None:
        self.size = size
        self._options = {"join": join, "share_groups": join and share_groups}
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._connections: list[Connection] = []
        self._directory: Path | None = None

    def __enter__(self) -> GlooWorld:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 120.0, **kwargs: Any) -> list[Any]:
        """Call `function(*args, **kwargs)` on every rank; the results by rank.

        `function` is a module-level function of a test module; it finds its rank with `torch.distributed`. Arguments
        and results are pickled by value. Before each call all generators are seeded alike, and Megatron's groups,
        random states and calculators are gone.

        Raises:
            GlooWorldError: also ends the processes, since the ranks no longer agree; the next call starts new ones.
        """
        started = time.monotonic()
        timeout += 0.0 if self._processes else START_TIMEOUT_S
        self.submit(function, *args, **kwargs)
        answers = self._collect(started + timeout)
        failures = [f"rank {rank}: {answer[1]}" for rank, answer in enumerate(answers) if answer[0] != "ok"]
        if failures:
            self.close()
            raise GlooWorldError(f"{function.__qualname__} on {self.size} ranks:\n" + "\n".join(failures))
        return [pickle.loads(answer[1]) for answer in answers]

    def submit(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Start `function` on every rank without waiting; for ranks that are going to be killed with `close`."""
        if not self._processes:
            self._start()
        job = pickle.dumps((list(sys.path), function.__module__, function.__qualname__, pickle.dumps((args, kwargs))))
        for connection in self._connections:
            connection.send_bytes(job)

    def alive(self) -> bool:
        """Whether every rank's process is running."""
        return bool(self._processes) and all(process.is_alive() for process in self._processes)

    def close(self) -> None:
        """SIGKILL every rank; they have nothing to save."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        if self._directory is not None:
            shutil.rmtree(self._directory)
        self._processes, self._connections, self._directory = [], [], None

    @property
    def store(self) -> str:
        """A path for the ranks' rendezvous."""
        assert self._directory is not None
        return str(self._directory / "store")

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._directory = Path(tempfile.mkdtemp(prefix="gloo-"))
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            arguments = (rank, self.size, self.store, os.getcwd(), theirs)
            process = context.Process(target=gloo_worker.main, args=arguments, kwargs=self._options, daemon=True)
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


def run_ranks(function: Callable[..., Any], size: int, *args: Any, timeout: float = 120.0) -> list[Any]:
    """`function(rank, size, store path, *args)` in `size` fresh processes; what each returned.

    Raises:
        GlooWorldError: see `GlooWorld.run`.
    """
    with GlooWorld(size, join=False) as ranks:
        return ranks.run(gloo_worker.with_rank, function, args, timeout=timeout)
