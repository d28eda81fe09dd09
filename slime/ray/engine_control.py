"""What the rollout manager does with its engines: start, memory, weights, health, end."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import ray

from slime.ray.engine_group import RolloutServer, start_rollout_servers
from slime.ray.engine_recovery import EngineRecovery
from slime.ray.placement_group import Placement
from slime.ray.utils import Lock
from slime.utils.health_monitor import RolloutHealthMonitor

logger = logging.getLogger(__name__)

# Methods of these groups are answered while a rollout is generated, each group's one at a time.
CONTROL, WATCH = "control", "watch"
CONCURRENCY_GROUPS = {CONTROL: 1, WATCH: 1}

WeightTargets = tuple[list[Any], Any, int, list[int], list[int], list[dict[str, Any]]]


class EngineControl:
    """The manager's methods that concern engines.

    Attributes:
        servers: by model name.
    """

    def __init__(self, args: Namespace, pg: Placement) -> None:
        self.args = args
        self.servers: dict[str, RolloutServer] = {}
        self._pg = pg
        self._lock: Any = None
        self._targets: WeightTargets | None = None
        self._recoveries: dict[str, EngineRecovery] = {}
        self._monitors: list[RolloutHealthMonitor] = []

    def start_servers(self) -> None:
        """Begin to start routers and engines."""
        self.servers = start_rollout_servers(self.args, self._pg)
        self._lock = ray.remote(Lock).options(num_cpus=0).remote()

    def wait_servers(self) -> None:
        """Wait until all engines are ready, and watch them from then on with --use-fault-tolerance."""
        for server in self.servers.values():
            server.wait_ready()
        if self.args.use_fault_tolerance:
            for name, server in self.servers.items():
                self._recoveries[name] = EngineRecovery(self.args, server)
                self._monitors.append(RolloutHealthMonitor(self._recoveries[name], self.args))
            for monitor in self._monitors:
                monitor.start()

    @property
    def server(self) -> RolloutServer | None:
        """The first server whose weights are trained."""
        return next((server for server in self.servers.values() if server.update_weights), None)

    @property
    def rollout_engines(self) -> list[Any]:
        """The engines whose weights are trained."""
        return [] if self.server is None else self.server.engines

    # -- weights ------------------------------------------------------------------------------------------------------

    @ray.method(concurrency_group=CONTROL)
    def get_updatable_engines_and_lock(self) -> WeightTargets:
        """Engines that receive weights, the lock around them, how many are new, and their devices and layout.

        The same for every trainer: an engine that fails after `recover_updatable_engines` is still in it.
        """
        if self._targets is None:
            self._targets = self._weight_targets()
        return self._targets

    def _weight_targets(self) -> WeightTargets:
        server = self.server
        if server is None:
            return [], self._lock, 0, [], [], []
        return (
            server.engines,
            self._lock,
            server.num_new_engines,
            server.engine_gpu_counts,
            server.engine_gpu_offsets,
            server.engine_parallel_configs,
        )

    @ray.method(concurrency_group=CONTROL)
    def clear_updatable_num_new_engines(self) -> None:
        """All engines have the current weights: new ones may serve."""
        self._targets = None
        if self.server is not None:
            self.server.num_new_engines = 0
        if (recovery := self._recovery()) is not None:
            recovery.admit()

    def check_weights(self, action: str) -> None:
        """`snapshot`, `reset_tensors` or `compare` on the engines that receive weights."""
        if self.server is not None:
            self.server.check_weights(action)

    # -- health -------------------------------------------------------------------------------------------------------

    @ray.method(concurrency_group=CONTROL)
    def watch_engines(self) -> list[ray.ObjectRef]:
        """References of which one fails as soon as an engine dies."""
        return [ref for server in self.servers.values() for ref in server.watch()]

    @ray.method(concurrency_group=WATCH)
    def wait_until_lost(self) -> None:
        """With fault tolerance: return when no engine that receives weights is left."""
        recovery = self._recovery()
        assert recovery is not None
        recovery.lost.wait()

    @ray.method(concurrency_group=CONTROL)
    def recover_updatable_engines(self) -> None:
        """Before weights are sent: stop probing, and put engines where some have failed.

        Raises:
            RuntimeError: no engine is left, and none could be started.
        """
        self.health_monitoring_pause()
        self._targets = None
        if (recovery := self._recovery()) is not None:
            recovery.retire_silent()
            recovery.recover()

    @ray.method(concurrency_group=CONTROL)
    def health_monitoring_pause(self) -> None:
        """No probes: engines may be asleep, or paused."""
        for monitor in self._monitors:
            monitor.pause()

    @ray.method(concurrency_group=CONTROL)
    def health_monitoring_resume(self) -> None:
        """Probe the engines from now on."""
        for monitor in self._monitors:
            monitor.resume()

    def pop_failure_counts(self) -> dict[str, int]:
        """Metric name → engines and routers that failed and were replaced since the last call."""
        total: Counter[str] = Counter()
        for recovery in self._recoveries.values():
            total.update(recovery.pop_counts())
        return dict(total)

    def _recovery(self) -> EngineRecovery | None:
        return None if self.server is None else self._recoveries.get(self.server.model_name)

    # -- memory and end -----------------------------------------------------------------------------------------------

    @ray.method(concurrency_group=CONTROL)
    def offload(self) -> None:
        self.health_monitoring_pause()
        self._on_servers(lambda server: server.offload())

    @ray.method(concurrency_group=CONTROL)
    def onload(self, tags: Sequence[str] | None = None) -> None:
        self._on_servers(lambda server: server.onload(tags))

    @ray.method(concurrency_group=CONTROL)
    def onload_weights(self) -> None:
        self._on_servers(lambda server: server.onload_weights())

    @ray.method(concurrency_group=CONTROL)
    def onload_kv(self) -> None:
        self._on_servers(lambda server: server.onload_kv())

    def _on_servers(self, action: Callable[[RolloutServer], None]) -> None:
        """Act on all servers; where engines fail meanwhile, fault tolerance goes on with the others."""
        for name, server in self.servers.items():
            try:
                action(server)
            except Exception:
                recovery = self._recoveries.get(name)
                if recovery is None or not recovery.retire_silent():
                    raise
                action(server)

    def dispose(self) -> None:
        """Stop engines and routers, and wait until they are gone."""
        for monitor in self._monitors:
            monitor.stop()
        for server in self.servers.values():
            server.shutdown()
        logger.info("engines and router have stopped")
