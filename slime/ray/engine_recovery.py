"""Taking failed engines out of service, and putting new ones in their places."""

from __future__ import annotations

import logging
import threading
import time
from argparse import Namespace
from collections import Counter
from dataclasses import dataclass
from typing import Any

import ray

from slime.backends.sglang_utils.control_client import CONTROL_SECONDS
from slime.backends.sglang_utils.sglang_engine import TRANSFER_SECONDS
from slime.ray.engine_group import REGISTER_SECONDS, RolloutServer
from slime.ray.failures import summary
from slime.ray.router import deregister_worker
from slime.ray.server_group import ServerGroup
from slime.ray.utils import get_all

logger = logging.getLogger(__name__)

# An engine actor answers this much after its own deadline for the server; later it hangs itself.
ACTOR_GRACE_SECONDS = 5.0


@dataclass(frozen=True)
class Place:
    """An engine's place: a group, and the number of the engine in it."""

    group: ServerGroup
    number: int

    @property
    def engine(self) -> Any:
        return self.group.engine(self.number)

    def __str__(self) -> str:
        rank = self.group.rank_offset + self.number * self.group.nodes_per_engine
        return f"engine {rank}"


class EngineRecovery:
    """One server's. Health monitors report failures to it, and the manager lets it recover before weights are sent.

    A new engine starts with the weights of the model's folder, so the router learns of it only from `admit`, after it
    has been sent the current ones.

    Attributes:
        lost: set while no engine serves.
        counts: engine failures, failed starts and router restarts since `pop_counts`.
    """

    def __init__(self, args: Namespace, server: RolloutServer) -> None:
        self.args = args
        self.server = server
        self.lost = threading.Event()
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._router_lock = threading.RLock()
        self._urls: dict[Any, str] = {}  # of the engines that serve
        self._new: list[Place] = []  # started, waiting for weights
        self._failed_at: dict[Place, float] = {}
        places = [Place(group, number) for group in server.server_groups for number in group.numbers]
        self._note_urls(places)

    # -- failures -----------------------------------------------------------------------------------------------------

    def serving(self) -> list[Any]:
        """The engines (first actors) that the router sends requests to."""
        with self._lock:
            return list(self._urls)

    def actors_of(self, engine: Any) -> list[Any]:
        """All actors of an engine that serves."""
        place = self._place_of(engine)
        return [] if place is None else place.group.nodes_of(place.number)

    def retire(self, engine: Any, reason: str) -> None:
        """Take a failed engine out of the router and kill it, which is bounded in time also where it hangs.

        Its requests fail at once, and their senders try them again on the engines that are left.
        """
        with self._lock:
            place, url = self._place_of(engine), self._urls.pop(engine, None)
            if place is None or url is None:
                return
            actors = place.group.take_out(place.number)
            self._failed_at[place] = time.monotonic()
            self.counts["engine_failures"] += 1
            left = len(self._urls)
        logger.error("%s at %s is taken out of service, %d are left: %s", place, url, left, reason)
        deregister_worker(self.server.router.url, url)
        for actor in actors:
            ray.kill(actor)
        if left == 0:
            self.lost.set()

    def retire_silent(self) -> bool:
        """Ask all engines something that their schedulers answer, also when paused; retire those that don't.

        Returns:
            Whether any was retired.
        """
        limit = self.args.rollout_health_check_timeout
        refs = {engine: engine.get_server_info.remote(limit) for engine in self.serving()}
        deadline = time.monotonic() + limit + ACTOR_GRACE_SECONDS
        before = len(self.serving())
        for engine, ref in refs.items():
            try:
                get_all([ref], timeout=max(0.0, deadline - time.monotonic()), what="answers of an engine's scheduler")
            except Exception as error:
                self.retire(engine, summary(error))
        return len(self.serving()) < before

    def revive_router(self) -> None:
        """Start the router again if its process has ended, and tell it of the engines.

        Raises:
            RouterError: it does not start.
        """
        router = self.server.router
        with self._router_lock:
            if not router.has_ended:
                return
            began = time.monotonic()
            logger.error("the router at %s has died and is started again", router.url)
            router.restart()
            self.counts["router_restarts"] += 1
            self._register(self.serving())
        logger.warning("the router at %s serves again after %.1f s", router.url, time.monotonic() - began)

    # -- replacement --------------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Start an engine in every empty place and wait for it. `admit` lets them serve.

        An engine that does not start is left out until the next time.

        Raises:
            RuntimeError: no engine is left; its cause is the last failure.
        """
        failure: Exception | None = None
        deadline = time.monotonic() + self.args.engine_start_timeout + REGISTER_SECONDS
        for place, refs in self._start_missing():
            try:
                get_all(refs, timeout=max(0.0, deadline - time.monotonic()), what=f"the start of {place}")
                if place.group.needs_offload:  # as the other engines' at this time: they get it back part by part
                    release = place.engine.release_memory_occupation.remote()
                    get_all([release], timeout=TRANSFER_SECONDS, what=f"releasing the memory of {place}")
            except Exception as error:
                failure = error
                self._give_up(place, error)
            else:
                self._new.append(place)
        if not self._new and not self._urls:
            raise RuntimeError(f"no engine of model {self.server.model_name!r} is left to recover") from failure

    def admit(self) -> None:
        """The new engines have the current weights: the router may send them requests."""
        if not self._new:
            return
        places, self._new = self._new, []
        self.revive_router()
        self._note_urls(places)
        self._register([place.engine for place in places])
        if self.serving():
            self.lost.clear()
        for place in places:
            since = self._failed_at.pop(place, None)
            if since is not None:
                logger.warning("%s serves again, %.1f s after it failed", place, time.monotonic() - since)

    def pop_counts(self) -> dict[str, int]:
        """Metric name → what happened since the last call; empty when nothing did."""
        with self._lock:
            counts, self.counts = self.counts, Counter()
        return {f"rollout/{name}": count for name, count in counts.items()}

    def _start_missing(self) -> list[tuple[Place, list[ray.ObjectRef]]]:
        started = []
        for group in self.server.server_groups:
            missing = [number for number in range(group.num_engines) if number not in group.numbers]
            if not missing:
                continue
            try:
                refs = group.start_engines(register=False)
            except Exception as error:  # such as a node that is gone
                for number in missing:
                    self._give_up(Place(group, number), error)
            else:
                started += [(Place(group, number), refs[number]) for number in missing]
        return started

    def _give_up(self, place: Place, error: Exception) -> None:
        logger.error(
            "%s did not start, the run goes on without it until weights are sent again: %s", place, summary(error)
        )
        with self._lock:
            self.counts["engine_failed_starts"] += 1
            place.group.num_new_engines = max(1, place.group.num_new_engines - 1)  # trainers must connect anew
            actors = place.group.take_out(place.number)
        for actor in actors:
            if actor is not None:
                ray.kill(actor)

    def _register(self, engines: list[Any]) -> None:
        """Tell the router of engines; one that it doesn't take is retired."""
        router = self.server.router
        refs = {engine: engine.register.remote(router.ip, router.port) for engine in engines}
        deadline = time.monotonic() + REGISTER_SECONDS
        for engine, ref in refs.items():
            try:
                get_all([ref], timeout=max(0.0, deadline - time.monotonic()), what="registering with the router")
                router.wait_workers([self._urls[engine]], max(0.0, deadline - time.monotonic()))
            except Exception as error:
                self.retire(engine, f"it could not be registered with the router: {error}")

    def _note_urls(self, places: list[Place]) -> None:
        engines = [place.engine for place in places]
        urls = get_all([engine.get_url.remote() for engine in engines], timeout=CONTROL_SECONDS, what="engine URLs")
        with self._lock:
            self._urls.update(zip(engines, urls, strict=True))

    def _place_of(self, engine: Any) -> Place | None:
        for group in self.server.server_groups:
            for number in group.numbers:
                if group.engine(number) == engine:
                    return Place(group, number)
        return None
