"""What every part that talks to Ray needs: waiting that fails at the first error, a lock, the address of this node."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import ray

logger = logging.getLogger(__name__)

_LOCK_POLL_S = 0.02


def get_all(refs: Sequence[ray.ObjectRef], *, timeout: float | None = None, what: str = "remote calls") -> list[Any]:
    """Results of `refs` in order. Raises as soon as one of them fails, also while others still run.

    `ray.get` on a list waits for every element first, so a dead actor would hide behind a peer that waits for it.

    Raises:
        TimeoutError: not all have finished after `timeout` seconds; the message says how many had.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    pending = list(refs)
    while pending:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        done, pending = ray.wait(pending, num_returns=1, timeout=left)
        if not done:
            raise TimeoutError(f"{what}: {len(pending)} of {len(refs)} had not finished after {timeout:.0f} s")
        ray.get(done)
    return ray.get(list(refs))


class Lock:
    """Mutual exclusion between actors that push weights to the same engines. Run as a Ray actor."""

    def __init__(self) -> None:
        self._holder: str | None = None

    def acquire(self, holder: str = "") -> bool:
        """Take the lock when it is free; whether it was taken."""
        if self._holder is not None:
            return False
        self._holder = holder
        return True

    def release(self) -> None:
        if self._holder is None:
            raise RuntimeError("the lock is released but nobody holds it")
        self._holder = None


def acquire(lock: Any, holder: str, timeout: float) -> None:
    """Take a `Lock` actor's lock.

    Raises:
        TimeoutError: it was not free within `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while not get_all([lock.acquire.remote(holder)], timeout=timeout, what=f"the lock for {holder}")[0]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{holder} did not get the lock of the engines within {timeout:.0f} s")
        time.sleep(_LOCK_POLL_S)


def release(lock: Any) -> None:
    """Give back what `acquire` took."""
    lock.release.remote()
