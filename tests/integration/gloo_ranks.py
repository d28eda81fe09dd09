"""Run a function on several gloo ranks, each a process forked from one server that has torch and Megatron loaded."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

PRELOAD = ["tests.integration.gloo_ranks_preload"]


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120) -> list[Any]:
    """`function(rank, world_size, store_path, *args)` on each rank; what each returned.

    Raises:
        AssertionError: a rank raised (its traceback is in the message), died, or did not finish in time.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory() as directory:
        ranks = []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            target = (function, sender, rank, world_size, os.path.join(directory, "store"), *args)
            process = context.Process(target=_run, args=target, daemon=True)
            process.start()
            sender.close()
            ranks.append((process, receiver))
        try:
            return [_result(rank, process, receiver, timeout) for rank, (process, receiver) in enumerate(ranks)]
        finally:
            for process, _ in ranks:
                process.kill()
                process.join()


def _result(rank: int, process: Any, receiver: Connection, timeout: float) -> Any:
    if not wait([receiver], timeout):
        raise AssertionError(f"rank {rank} did not finish within {timeout} s")
    try:
        succeeded, result = receiver.recv()
    except EOFError:
        process.join(5)
        raise AssertionError(f"rank {rank} died with exit code {process.exitcode}") from None
    if not succeeded:
        raise AssertionError(f"rank {rank} failed:\n{result}")
    return result


def _run(function: Callable[..., Any], sender: Connection, *args: Any) -> None:
    try:
        sender.send((True, function(*args)))
    except BaseException:
        sender.send((False, traceback.format_exc()))
    finally:
        sender.close()
        os._exit(0)  # skip the teardown of groups whose peers may be gone
