"""The driver's side of the rollout manager."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray

logger = logging.getLogger(__name__)


class ManagerClient:
    """Calls the manager and waits.

    A call raises as soon as one of the engines has died, whatever the manager is waiting for meanwhile. With fault
    tolerance the manager replaces engines, and only the loss of all of them is the driver's business: it sends the
    weights again, which brings new engines, and goes on waiting.

    Args:
        handle: the manager's actor handle, for those that talk to it themselves.
        started: the result of its `start`.
        fault_tolerance: whether the manager replaces engines.

    Attributes:
        on_lost_engines: what brings engines back with fault tolerance.
    """

    def __init__(self, handle: Any, started: ray.ObjectRef, fault_tolerance: bool = False) -> None:
        self.handle = handle
        self.on_lost_engines: Callable[[], None] | None = None
        self._started = started
        self._coming: dict[int, ray.ObjectRef] = {}
        self._fault_tolerance = fault_tolerance
        self._watches: list[ray.ObjectRef] | None = None  # of which one ends when an engine dies, or all are lost
        self._replacing = False

    def get_num_rollout_per_epoch(self) -> int | None:
        return self._call(self.handle.get_num_rollout_per_epoch)

    def generate(self, rollout_id: int) -> Any:
        """See `RolloutManager.generate`."""
        return self._call(self.handle.generate, rollout_id)

    def start_generate(self, rollout_id: int) -> None:
        """Begin a rollout. The manager does everything else that it is asked for afterwards."""
        self._coming = {rollout_id: self.handle.generate.remote(rollout_id)}

    def generated(self, rollout_id: int) -> Any:
        """What `generate` would return, of the rollout that was begun last."""
        return self._wait(self._coming[rollout_id])

    def keeps_generating(self) -> bool:
        """See `RolloutManager.keeps_generating`."""
        return self._call(self.handle.keeps_generating)

    def eval(self, rollout_id: int) -> dict[str, Any]:
        """See `RolloutManager.eval`."""
        return self._call(self.handle.eval, rollout_id)

    def save(self, rollout_id: int) -> None:
        self._call(self.handle.save, rollout_id)

    def load(self, rollout_id: int) -> None:
        self._call(self.handle.load, rollout_id)

    def offload(self) -> None:
        self._call(self.handle.offload)

    def onload_weights(self) -> None:
        self._call(self.handle.onload_weights)

    def onload_kv(self) -> None:
        self._call(self.handle.onload_kv)

    def check_weights(self, action: str) -> None:
        self._call(self.handle.check_weights, action)

    def recover_updatable_engines(self) -> None:
        """See `EngineControl.recover_updatable_engines`."""
        self._call(self.handle.recover_updatable_engines)

    def health_monitoring_resume(self) -> None:
        self._call(self.handle.health_monitoring_resume)

    @contextmanager
    def replacing_engines(self) -> Iterator[None]:
        """In this block engines may be lost, since it brings new ones."""
        self._replacing = True
        try:
            yield
        finally:
            self._replacing = False
            if self._watches and ray.wait(self._watches, timeout=0)[0]:
                self._watches = None  # what was lost has been replaced

    def _call(self, method: Any, *method_args: Any) -> Any:
        return self._wait(method.remote(*method_args))

    def _wait(self, answer: ray.ObjectRef) -> Any:
        while True:
            watches = [] if self._replacing else self._current_watches()
            (done, *_), _ = ray.wait([answer, *watches], num_returns=1)
            if done == answer:
                return ray.get(answer)
            ray.get(done)  # raises what ended the engine; an engine that was shut down needs no watching
            watches.remove(done)
            if self._fault_tolerance:
                self._revive()

    def _current_watches(self) -> list[ray.ObjectRef]:
        if self._watches is None:
            ray.get(self._started)
            if self._fault_tolerance:
                self._watches = [self.handle.wait_until_lost.remote()]
            else:
                self._watches = ray.get(self.handle.watch_engines.remote())
        return self._watches

    def _revive(self) -> None:
        if self.on_lost_engines is None:
            raise RuntimeError("all engines were lost before there were weights to send to new ones")
        logger.error("no engine is left: new ones are started and sent the weights")
        self._watches = None
        self.on_lost_engines()
