"""The engines behind the router, and which of them a request goes to."""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections import OrderedDict
from collections.abc import Collection
from typing import Any

SESSIONS_KEPT = 100_000  # whose engine is remembered; a session that returns later begins at the least busy one
AVOID_SECONDS = 5.0  # an engine that did not answer is the last choice for so long


@dataclasses.dataclass(eq=False)
class Worker:
    """An engine.

    Attributes:
        load: requests on their way.
        served: requests that it has had; breaks ties between engines of equal load.
        avoid_until: when it counts as healthy again, after it did not answer.
    """

    url: str
    worker_type: str = "regular"
    id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    load: int = 0
    served: int = 0
    avoid_until: float = 0.0

    @property
    def is_healthy(self) -> bool:
        return time.monotonic() >= self.avoid_until

    def facts(self) -> dict[str, Any]:
        """As sglang-router lists it."""
        return {
            "id": self.id,
            "url": self.url,
            "worker_type": self.worker_type,
            "is_healthy": self.is_healthy,
            "load": self.load,
        }


class WorkerPool:
    """Least load, but a session stays with the engine that has its KV cache, as long as that answers."""

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}  # by URL
        self._session_worker: OrderedDict[str, Worker] = OrderedDict()

    @property
    def workers(self) -> list[Worker]:
        return list(self._workers.values())

    def add(self, url: str, worker_type: str = "regular") -> Worker:
        """Take in an engine; one that is known already stays as it is, but is trusted again."""
        worker = self._workers.setdefault(url, Worker(url, worker_type))
        worker.avoid_until = 0.0
        return worker

    def remove(self, worker_id: str) -> bool:
        """Forget an engine; whether it was known. Its sessions move with their next request."""
        for url, worker in self._workers.items():
            if worker.id == worker_id:
                del self._workers[url]
                return True
        return False

    def find(self, worker_id: str) -> Worker | None:
        return next((worker for worker in self._workers.values() if worker.id == worker_id), None)

    def choose(self, session: str | None = None, tried: Collection[Worker] = ()) -> Worker | None:
        """The engine for a request that has failed on those in `tried`; None when no other is left."""
        left = [worker for worker in self._workers.values() if worker not in tried]
        if not left:
            return None
        kept = self._session_worker.get(session) if session else None
        if kept is not None and kept.is_healthy and kept in left:
            self._session_worker.move_to_end(session)  # type: ignore[arg-type]
            return kept
        worker = min(left, key=lambda worker: (not worker.is_healthy, worker.load, worker.served))
        if session:
            self._session_worker[session] = worker
            self._session_worker.move_to_end(session)
            if len(self._session_worker) > SESSIONS_KEPT:
                self._session_worker.popitem(last=False)
        return worker

    def avoid(self, worker: Worker) -> None:
        """It did not answer."""
        worker.avoid_until = time.monotonic() + AVOID_SECONDS
