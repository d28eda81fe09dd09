"""Progress of a piece of work in any process, shown on the driver's terminal."""

from __future__ import annotations

import time
from argparse import Namespace
from types import TracebackType

from slime.observability.hub_client import connect
from slime.observability.trackers.console import ProgressEvent

MIN_INTERVAL_S = 0.2


class Progress:
    """A bar named `name` over `total` units; also a context manager that closes it.

    `update` may be called as often as one likes, from an event loop too: it never waits, and sends at most five times
    a second.
    """

    def __init__(self, args: Namespace, name: str, total: int) -> None:
        self._hub = connect(args)
        self._name = name
        self._total = total
        self._done = 0
        self._started = time.time()
        self._postfix: dict[str, float | str] = {}
        self._sent_at = float("-inf")
        self._send()

    def update(self, n: int = 1, **postfix: float | str) -> None:
        """`n` more units are done; `postfix` replaces what is shown behind the bar (e.g. reward=0.4)."""
        self._done += n
        self._postfix.update(postfix)
        if self._done >= self._total or time.monotonic() - self._sent_at >= MIN_INTERVAL_S:
            self._send()

    def close(self) -> None:
        """Take the bar away."""
        self._send(closed=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _send(self, closed: bool = False) -> None:
        self._sent_at = time.monotonic()
        self._hub.progress(
            ProgressEvent(self._name, self._done, self._total, self._started, closed, dict(self._postfix))
        )
