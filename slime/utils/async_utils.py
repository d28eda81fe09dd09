"""One event loop in a background thread, for synchronous code that runs coroutines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")


class AsyncLoopThread:
    """An event loop that runs for ever in a daemon thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="async-loop", daemon=True).start()

    def run(self, coro: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end and return its result; an interrupt while waiting cancels it."""
        future = asyncio.run_coroutine_threadsafe(coro, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


@cache
def get_async_loop() -> AsyncLoopThread:
    """The process's loop: what binds to a loop (clients, semaphores) outlives single calls."""
    return AsyncLoopThread()


def run(coro: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the process's loop."""
    return get_async_loop().run(coro)
