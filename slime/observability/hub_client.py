"""How a process reaches the run's metrics hub: the named Ray actor, or a hub of its own where there is no Ray."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from typing import Any, Protocol

from slime.observability.hub import MetricsHub
from slime.observability.trackers.base import Metrics
from slime.observability.trackers.console import ConsoleUpdate, ProgressEvent
from slime.observability.tracking_config import TrackingConfig, run_id_of, tracking_config

NAMESPACE = "slime"
START_TIMEOUT_S = 180.0  # W&B's own sign-in may take 90 s
CALL_TIMEOUT_S = 60.0
FINISH_TIMEOUT_S = 120.0  # an online W&B run uploads what is left


class HubClient(Protocol):
    """What every process can do with the hub."""

    def log(self, metrics: Metrics, step_key: str, step: int) -> None: ...
    def progress(self, event: ProgressEvent) -> None: ...
    def drain(self) -> ConsoleUpdate: ...
    def locations(self) -> dict[str, str]: ...
    def wandb_run_id(self) -> str | None: ...
    def finish(self) -> None: ...
    def release(self) -> None: ...


class LocalHub(MetricsHub):
    """The hub of a process without Ray."""

    def release(self) -> None:
        """Nothing outside this process to end."""


class RemoteHub:
    """The hub behind an actor handle."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def log(self, metrics: Metrics, step_key: str, step: int) -> None:
        """Returns when the hub has the metrics, so that none is in flight when the run ends."""
        self._call("log", metrics, step_key, step)

    def progress(self, event: ProgressEvent) -> None:
        """Sent without waiting: losing one update is harmless, slowing a rollout is not."""
        self._handle.progress.remote(event)

    def drain(self) -> ConsoleUpdate:
        return self._call("drain")

    def locations(self) -> dict[str, str]:
        return self._call("locations", timeout=START_TIMEOUT_S)

    def wandb_run_id(self) -> str | None:
        return self._call("wandb_run_id")

    def finish(self) -> None:
        self._call("finish", timeout=FINISH_TIMEOUT_S)

    def release(self) -> None:
        """End the hub's process."""
        import ray

        ray.kill(self._handle)

    def _call(self, method: str, *args: Any, timeout: float = CALL_TIMEOUT_S) -> Any:
        import ray

        return ray.get(getattr(self._handle, method).remote(*args), timeout=timeout)


_clients: dict[str, HubClient] = {}
"""Run id → this process's connection. `log(args, ...)` is called with nothing but the arguments, hence the table."""


def hub_name(run_id: str) -> str:
    return f"metrics-hub-{run_id}"


def start_hub(args: Namespace) -> HubClient:
    """Start the run's hub: an actor on this node when Ray is up (paths are this machine's), else in this process."""
    config = tracking_config(args, os.environ)
    client = _start_actor(config) if _ray_is_up() else LocalHub(config)
    _clients[config.run_id] = client
    return client


def _start_actor(config: TrackingConfig) -> RemoteHub:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(MetricsHub).options(
        name=hub_name(config.run_id), namespace=NAMESPACE, num_cpus=0, scheduling_strategy=here
    )
    return RemoteHub(actor.remote(config))


def connect(args: Namespace) -> HubClient:
    """This process's connection to the run's hub, made on first use.

    Raises:
        RuntimeError: Ray is up but the run has no hub: `init_tracking` was not called, or the hub is gone.
    """
    run_id = run_id_of(args)
    if run_id not in _clients:
        _clients[run_id] = _find_actor(run_id) if _ray_is_up() else LocalHub(tracking_config(args, os.environ))
    return _clients[run_id]


def _find_actor(run_id: str) -> RemoteHub:
    import ray

    try:
        return RemoteHub(ray.get_actor(hub_name(run_id), namespace=NAMESPACE))
    except ValueError:
        raise RuntimeError(
            f"run {run_id} has no metrics hub: the driver calls init_tracking first and finish_tracking last"
        ) from None


def connected(args: Namespace) -> HubClient | None:
    """The connection that this process already has, if any."""
    return _clients.get(run_id_of(args))


def forget(args: Namespace) -> None:
    """Drop this process's connection."""
    _clients.pop(run_id_of(args), None)


def _ray_is_up() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()
