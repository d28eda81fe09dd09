"""A pool of grader processes. A grading that takes too long costs its process, never the event loop."""

from __future__ import annotations

import asyncio
import atexit
import functools
import os
import pickle
import queue
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import slime
from slime.rollout.rm_hub.errors import GraderError, GraderTimeout, GraderUnavailable, UngradableRow
from slime.rollout.rm_hub.grader_worker import HEADER, write_message
from slime.rollout.rm_hub.graders import Score

LOAD_LIMIT_S = 300.0  # imports on a loaded machine
MAX_WORKERS = 8


class _Worker:
    """One grader process, used by one thread at a time."""

    def __init__(self) -> None:
        root = str(Path(slime.__file__).parents[1])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        process = subprocess.Popen(
            [sys.executable, "-m", "slime.rollout.rm_hub.grader_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C in a terminal is for the driver; this process ends with its stdin
        )
        assert process.stdin is not None and process.stdout is not None
        self._process, self._jobs, self._verdicts = process, process.stdin, process.stdout
        self.loaded: set[str] = set()

    def grade(self, limit: float, rm_type: str, *call: Any) -> Score:
        """Score in at most `limit` seconds, the time for the type's imports not counted."""
        self.load(rm_type)
        return self._ask(limit, ("grade", limit, rm_type, *call), f"rm type {rm_type}")

    def load(self, rm_type: str) -> None:
        """Import what the type needs, once."""
        if rm_type in self.loaded:
            return
        try:
            self._ask(LOAD_LIMIT_S, ("load", rm_type), f"rm type {rm_type} can't be loaded")
        except GraderError as error:
            raise GraderUnavailable(str(error)) from error
        self.loaded.add(rm_type)

    def _ask(self, limit: float, job: tuple[Any, ...], what: str) -> Any:
        try:
            write_message(self._jobs, job)
            kind, value = self._read(time.monotonic() + limit)
        except TimeoutError:
            self.kill()
            raise GraderTimeout(f"{what}: no answer in {limit:g} s") from None
        except (EOFError, OSError):
            self.kill()
            raise GraderError(f"{what}: its process died (status {self._process.returncode})") from None
        if kind == "ok":
            return value
        if kind == "row":
            raise UngradableRow(value)
        raise (GraderUnavailable if kind == "unavailable" else GraderError)(f"{what}: {value}")

    def _read(self, deadline: float) -> Any:
        (length,) = HEADER.unpack(self._read_bytes(HEADER.size, deadline))
        return pickle.loads(self._read_bytes(length, deadline))

    def _read_bytes(self, count: int, deadline: float) -> bytes:
        pipe, data = self._verdicts.fileno(), b""
        while len(data) < count:
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError
            chunk = os.read(pipe, count - len(data))
            if not chunk:
                raise EOFError
            data += chunk
        return data

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class GraderPool:
    """Up to `num_workers` grader processes, started as they are needed."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="grader")
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._workers: set[_Worker] = set()
        self._lock = threading.Lock()

    async def grade(self, limit: float, rm_type: str, *call: Any) -> Score:
        """Score in a worker process; `call` is the rest of `graders.grade`'s arguments.

        Raises:
            GraderTimeout: it took longer than `limit` seconds.
            GraderError: the grader raised, or its process died.
            GraderUnavailable: what the rm type needs can't be imported.
            UngradableRow: label or metadata lack what the rm type needs.
        """
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._grade, limit, rm_type, call)

    def start(self, rm_type: str) -> None:
        """Start all workers and let them import what `rm_type` needs; returns at once.

        A type that can't be loaded is reported by its first grading.
        """
        for _ in range(self.num_workers):
            self._threads.submit(self._with_worker, functools.partial(_Worker.load, rm_type=rm_type))

    def _grade(self, limit: float, rm_type: str, call: tuple[Any, ...]) -> Score:
        return self._with_worker(lambda worker: worker.grade(limit, rm_type, *call))

    def _with_worker(self, use: Callable[[_Worker], Any]) -> Any:
        worker = self._take()
        try:
            return use(worker)
        finally:
            if worker.alive:
                self._idle.put(worker)
            else:
                self._replace(worker)

    def _replace(self, worker: _Worker) -> None:
        """Start another in the place of a dead one, with the same imports, before a grading has to wait for them."""
        with self._lock:
            if worker not in self._workers:  # the pool was closed
                return
            self._workers.discard(worker)
        for rm_type in sorted(worker.loaded):
            self._threads.submit(self._with_worker, functools.partial(_Worker.load, rm_type=rm_type))

    def _take(self) -> _Worker:
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            worker = _Worker()  # never more than threads: each thread holds at most one
            with self._lock:
                self._workers.add(worker)
            return worker

    def close(self) -> None:
        """End all workers."""
        with self._lock:
            workers, self._workers = self._workers, set()
        for worker in workers:
            worker.kill()
        self._threads.shutdown(wait=False, cancel_futures=True)


@functools.cache
def grader_pool() -> GraderPool:
    """The process's pool; it ends with the process, or with `close_grader_pool`."""
    pool = GraderPool(max(1, min(MAX_WORKERS, os.cpu_count() or 1)))
    atexit.register(pool.close)
    return pool


def close_grader_pool() -> None:
    """End the process's graders now; the next grading starts new ones."""
    if grader_pool.cache_info().currsize:
        grader_pool().close()
        grader_pool.cache_clear()
