"""Finds processes that outlived what started them. They carry a marker in their environment, so daemons show too."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import psutil

SESSION_MARKER = "SLIME_TEST_SESSION"
RUN_MARKER = "SLIME_TEST_RUN"

# Helpers of Python's multiprocessing end with the test process itself.
_ENDS_WITH_US = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
# A shared Ray cluster keeps idle workers and its own daemons between runs.
_RAY_ITSELF = (
    "ray::IDLE",
    "raylet",
    "gcs_server",
    "ray/_private",
    "ray/dashboard",
    "ray/autoscaler",
    "ray_process_reaper",
)


def marked_processes(marker: str, value: str) -> list[psutil.Process]:
    """Living processes, other than this one, whose environment has `marker=value`."""
    found = []
    for process in psutil.process_iter(["pid"]):
        if process.pid == os.getpid():
            continue
        try:
            alive = process.status() != psutil.STATUS_ZOMBIE
            if alive and process.environ().get(marker) == value and not _mentions(process, _ENDS_WITH_US):
                found.append(process)
        except psutil.Error:
            continue  # ended meanwhile, or not ours to look at
    return found


def work_in_cluster(session: str, since: float) -> list[psutil.Process]:
    """Processes of the session that began after `since` (epoch seconds) and are not the shared cluster's own."""
    return [
        process
        for process in marked_processes(SESSION_MARKER, session)
        if _began(process) > since and not _mentions(process, _RAY_ITSELF)
    ]


def wait_until_none(find: Callable[[], list[psutil.Process]], timeout: float) -> list[psutil.Process]:
    """What `find` still finds after `timeout` seconds, asking until it finds nothing."""
    deadline = time.monotonic() + timeout
    while (left := find()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def describe(processes: list[psutil.Process]) -> str:
    return "\n".join(f"  {process.pid}: {_command(process)[:200]}" for process in processes)


def kill(processes: list[psutil.Process]) -> None:
    """End processes that this session started and that should not be there."""
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def _began(process: psutil.Process) -> float:
    try:
        return process.create_time()
    except psutil.NoSuchProcess:
        return 0.0


def _mentions(process: psutil.Process, words: tuple[str, ...]) -> bool:
    command = _command(process)
    return any(word in command for word in words)


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()) or process.name()
    except psutil.Error:
        return "(ended)"
