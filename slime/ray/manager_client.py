"""The driver's side of the rollout manager."""

from __future__ import annotations

from typing import Any

import ray


class ManagerClient:
    """Calls the manager and waits. Every call raises as soon as one of the engines has died, whatever the manager is
    waiting for meanwhile.

    Args:
        handle: the manager's actor handle, for those that talk to it themselves.
        started: the result of its `start`.
    """

    def __init__(self, handle: Any, started: ray.ObjectRef) -> None:
        self.handle = handle
        self._started = started
        self._coming: dict[int, ray.ObjectRef] = {}
        self._engines: list[ray.ObjectRef] | None = None  # of which one fails when an engine dies

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

    def _call(self, method: Any, *method_args: Any) -> Any:
        return self._wait(method.remote(*method_args))

    def _wait(self, answer: ray.ObjectRef) -> Any:
        if self._engines is None:
            ray.get(self._started)
            self._engines = ray.get(self.handle.watch_engines.remote())
        while True:
            (done, *_), _ = ray.wait([answer, *self._engines], num_returns=1)
            if done == answer:
                return ray.get(answer)
            ray.get(done)  # raises what ended the engine; an engine that was shut down needs no watching
            self._engines.remove(done)
