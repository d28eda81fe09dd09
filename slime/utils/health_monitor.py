"""Watching a server's engines and router: deaths at once, hangs by probes."""

from __future__ import annotations

import logging
import threading
import time
from argparse import Namespace
from typing import Any

import ray

from slime.ray.engine_recovery import ACTOR_GRACE_SECONDS, EngineRecovery
from slime.ray.failures import summary

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5


class RolloutHealthMonitor:
    """A thread that takes failed engines of one server out of service, and starts a dead router again.

    Processes that end are seen at any time. Probes, which find what hangs, run while `resume` has been called last:
    an engine whose memory is released, or that is being sent weights, generates nothing.

    Args:
        recovery: of the server; engines without trained weights are replaced at once, the others by the manager.
    """

    def __init__(self, recovery: EngineRecovery, args: Namespace) -> None:
        self._recovery = recovery
        self._interval: float = args.rollout_health_check_interval
        self._timeout: float = args.rollout_health_check_timeout
        self._first_wait: float = args.rollout_health_check_first_wait
        self._next_round: float | None = None  # None: paused
        self._watches: dict[ray.ObjectRef, Any] = {}
        self._probes: dict[ray.ObjectRef, tuple[Any, float]] = {}  # engine, deadline
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="health-monitor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; engines that end from now on are not replaced."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join()

    def pause(self) -> None:
        """No probes, and those under way don't count."""
        self._next_round = None

    def resume(self) -> None:
        """Probe again, after --rollout-health-check-first-wait."""
        if self._next_round is None:
            self._next_round = time.monotonic() + self._first_wait

    def is_checking_enabled(self) -> bool:
        """Whether engines are probed."""
        return self._next_round is not None

    def _run(self) -> None:
        while not self._ending.is_set():
            try:
                self.check()
            except Exception:  # the watch must not end where what it watches for goes wrong in a new way
                logger.exception("watching the engines of model %s", self._recovery.server.model_name)
                self._ending.wait(POLL_SECONDS)

    def check(self) -> None:
        """One look at everything; waits for news for at most POLL_SECONDS."""
        self._watch_new_engines()
        self._begin_round()
        pending = [*self._watches, *self._probes]
        done = ray.wait(pending, num_returns=1, timeout=POLL_SECONDS)[0] if pending else []
        for ref in done:
            self._examine(ref)
        if not pending:
            self._ending.wait(POLL_SECONDS)
        self._retire_silent()
        if not self._ending.is_set():
            self._recovery.revive_router()
            self._replace_untrained()

    def _watch_new_engines(self) -> None:
        watched = list(self._watches.values())
        for engine in self._recovery.serving():
            if engine not in watched:
                for actor in self._recovery.actors_of(engine):
                    self._watches[actor.watch.remote()] = engine

    def _begin_round(self) -> None:
        now = time.monotonic()
        if self._next_round is None:
            self._probes.clear()
        elif now >= self._next_round and not self._probes:
            self._next_round = now + self._interval
            deadline = now + self._timeout + ACTOR_GRACE_SECONDS
            for engine in self._recovery.serving():
                self._probes[engine.health_generate.remote(self._timeout)] = (engine, deadline)

    def _examine(self, ref: ray.ObjectRef) -> None:
        engine = self._watches.pop(ref, None)
        if engine is None:
            engine, _ = self._probes.pop(ref)
        try:
            ray.get(ref)
        except Exception as error:
            if not self._ending.is_set():
                self._recovery.retire(engine, summary(error))
            self._forget(engine)

    def _retire_silent(self) -> None:
        now = time.monotonic()
        for engine in [engine for engine, deadline in self._probes.values() if now > deadline]:
            waited = self._timeout + ACTOR_GRACE_SECONDS
            self._recovery.retire(engine, f"no answer to a health probe within {waited:.0f} s")
            self._forget(engine)

    def _forget(self, engine: Any) -> None:
        self._watches = {ref: other for ref, other in self._watches.items() if other != engine}
        self._probes = {ref: entry for ref, entry in self._probes.items() if entry[0] != engine}

    def _replace_untrained(self) -> None:
        """Engines that get no weights from trainers need nothing else before they serve."""
        server = self._recovery.server
        if not server.update_weights and any(None in group.all_engines for group in server.server_groups):
            self._recovery.recover()
            self._recovery.admit()
