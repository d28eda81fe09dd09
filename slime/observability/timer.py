"""Named wall-clock timers of one process, read once per rollout by the perf metrics."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ParamSpec, TypeVar, overload

from slime.utils.misc import SingletonMeta

P = ParamSpec("P")
R = TypeVar("R")


class Timer(metaclass=SingletonMeta):
    """Sums the seconds spent under each name since the last reset."""

    def __init__(self) -> None:
        self._elapsed: dict[str, float] = {}
        self._started: dict[str, float] = {}
        self.seq_lens: list[int] = []
        """Lengths (tokens) of all samples of the current rollout, set by the trainer for throughput metrics."""

    def start(self, name: str) -> None:
        """AssertionError when `name` runs already."""
        assert name not in self._started, f"timer {name!r} was started twice"
        self._started[name] = time.perf_counter()

    def end(self, name: str) -> float:
        """Stop and return the seconds since `start`. AssertionError when `name` does not run."""
        assert name in self._started, f"timer {name!r} was ended but not started"
        elapsed = time.perf_counter() - self._started.pop(name)
        self.add(name, elapsed)
        return elapsed

    def is_running(self, name: str) -> bool:
        return name in self._started

    def add(self, name: str, elapsed_time: float) -> None:
        self._elapsed[name] = self._elapsed.get(name, 0.0) + elapsed_time

    def reset(self, name: str | None = None) -> None:
        """Forget the sum of `name`, or all sums. Running timers go on running."""
        if name is None:
            self._elapsed.clear()
        else:
            self._elapsed.pop(name, None)

    def log_dict(self) -> dict[str, float]:
        """Name → seconds, a copy; without timers that have not ended yet."""
        return dict(self._elapsed)

    @contextmanager
    def context(self, name: str) -> Iterator[None]:
        self.start(name)
        try:
            yield
        finally:
            self.end(name)


@overload
def timer(name_or_func: str) -> AbstractContextManager[None]: ...
@overload
def timer(name_or_func: Callable[P, R]) -> Callable[P, R]: ...
def timer(name_or_func: Any) -> Any:
    """`with timer("name"):`, `@timer("name")`, or `@timer` on a function, under its name."""
    if isinstance(name_or_func, str):
        return Timer().context(name_or_func)
    function = name_or_func

    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        with Timer().context(function.__name__):
            return function(*args, **kwargs)

    return timed


@contextmanager
def inverse_timer(name: str) -> Iterator[None]:
    """Pause the running timer `name` for the block (e.g. "train_wait" while training).

    The first time, when it does not run yet, it only starts it afterwards.
    """
    if Timer().is_running(name):
        Timer().end(name)
    try:
        yield
    finally:
        Timer().start(name)


def with_defer(deferred_func: Callable[[], Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: call `deferred_func` after the function, however it ends."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            finally:
                deferred_func()

        return wrapped

    return decorate
