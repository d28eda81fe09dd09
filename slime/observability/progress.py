"""Progress of a piece of work in any process, shown on the driver's terminal."""

from __future__ import annotations

import threading
import time
from argparse import Namespace
from types import TracebackType

from slime.observability.hub_client import connect
from slime.observability.trackers.console import ProgressEvent

MIN_INTERVAL_S = 0.2


class Progress:
    """A bar named `name` over `total` units; also a context manager that closes it.

    `update` may be called as often as one likes, from an event loop too: it never waits, and sends at most five times
    a second. What is held back is sent a moment later, so the bar is right while the slowest unit is waited for.
    """

    def __init__(self, args: Namespace, name: str, total: int) -> None:
        self._hub = connect(args)
        self._name = name
        self._total = total
        self._done = 0
        self._started = time.time()
        self._postfix: dict[str, float | str] = {}
        self._closed = False
        self._lock = threading.Lock()
        self._later: threading.Timer | None = None
        self._send()

    def update(self, n: int = 1, **postfix: float | str) -> None:
        """`n` more units are done; `postfix` replaces what is shown behind the bar (e.g. reward=0.4)."""
        with self._lock:
            self._done += n
            self._postfix.update(postfix)
            if self._done >= self._total:
                self._send()
            elif self._later is None:
                self._later = threading.Timer(MIN_INTERVAL_S, self._send_later)
                self._later.daemon = True
                self._later.start()

    def close(self) -> None:
        """Take the bar away."""
        with self._lock:
            if self._later is not None:
                self._later.cancel()
            self._send(closed=True)
            self._closed = True

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _send_later(self) -> None:
        with self._lock:
            self._later = None
            if not self._closed:
                self._send()

    def _send(self, closed: bool = False) -> None:
        self._hub.progress(
            ProgressEvent(self._name, self._done, self._total, self._started, closed, dict(self._postfix))
        )
