"""Engines of one kind and size on consecutive devices: their places, their actors, their memory."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slime.backends.sglang_utils.sglang_config import ServerGroupConfig
from slime.backends.sglang_utils.sglang_engine import SGLangEngine
from slime.ray.placement_group import Placement
from slime.ray.router import Router
from slime.ray.utils import get_all
from slime.utils import accelerator

# A trainer and an engine share a device when colocated, so neither may ask for all of it.
ENGINE_DEVICE_FRACTION = 0.2
# A request that waits for the server must not keep a health probe or the shutdown waiting.
ENGINE_CONCURRENCY = 8
_DIST_PORTS = 30  # SGLang takes ports after its rendezvous port for each data-parallel rank


@dataclasses.dataclass(eq=False)
class ServerGroup:
    """Engines of one kind and size on consecutive devices.

    Attributes:
        pg: the devices of all rollout engines.
        rank_offset: rank of the first engine actor of this group among all of the run.
        gpu_offset: its first device in `pg`.
        needs_offload: its devices are shared with trainers.
        update_weights: trained weights are sent to it.
        encoder_urls: encoder engines that it takes encoded images from.
        all_engines: actors, one per node of each engine; None where one is to be started.
        num_new_engines: engines that trainers have to connect to, because they were started since.
    """

    args: Namespace
    pg: Placement
    config: ServerGroupConfig
    model_path: str
    router: Router
    rank_offset: int
    gpu_offset: int
    needs_offload: bool
    update_weights: bool = True
    encoder_urls: list[str] = dataclasses.field(default_factory=list)
    all_engines: list[Any] = dataclasses.field(default_factory=list)
    num_new_engines: int = 0

    def __post_init__(self) -> None:
        self.all_engines = [None] * (self.config.num_gpus // self.gpus_per_engine_on_node)
        needed = self.gpu_offset + self.config.num_gpus
        if needed > len(self.pg.device_ids):
            raise ValueError(
                f"the {self.config.worker_type} engines take devices {self.gpu_offset} to {needed - 1} of the "
                f"rollout devices, but there are {len(self.pg.device_ids)}"
            )

    @property
    def num_gpus_per_engine(self) -> int:
        return self.config.num_gpus_per_engine

    @property
    def gpus_per_engine_on_node(self) -> int:
        return min(self.num_gpus_per_engine, self.args.num_gpus_per_node)

    @property
    def nodes_per_engine(self) -> int:
        return max(1, self.num_gpus_per_engine // self.args.num_gpus_per_node)

    @property
    def num_engines(self) -> int:
        """Places for engines."""
        return len(self.all_engines) // self.nodes_per_engine

    @property
    def numbers(self) -> list[int]:
        """Which of the group's engines there are; one that was taken out is missing until another is in its place."""
        firsts = self.all_engines[:: self.nodes_per_engine]
        return [number for number, engine in enumerate(firsts) if engine is not None]

    @property
    def engines(self) -> list[Any]:
        """The actors that serve HTTP: the first node's of each engine that there is."""
        return [self.engine(number) for number in self.numbers]

    def engine(self, number: int) -> Any:
        """The actor that serves HTTP for an engine."""
        return self.all_engines[number * self.nodes_per_engine]

    def nodes_of(self, number: int) -> list[Any]:
        """All actors of an engine."""
        first = number * self.nodes_per_engine
        return self.all_engines[first : first + self.nodes_per_engine]

    def gpu_offset_of(self, number: int) -> int:
        """The first device of an engine, counted over all rollout devices."""
        return self.gpu_offset + number * self.num_gpus_per_engine

    def take_out(self, number: int) -> list[Any]:
        """Leave an engine's places empty; the actors that were there."""
        actors = self.nodes_of(number)
        first = number * self.nodes_per_engine
        self.all_engines[first : first + self.nodes_per_engine] = [None] * self.nodes_per_engine
        return actors

    def parallel_config(self) -> dict[str, Any]:
        """How each engine is laid out."""
        setting = {name: getattr(self.args, f"sglang_{name}", None) or 1 for name in ("pp_size", "dp_size", "ep_size")}
        setting.update({name: self.config.overrides[name] for name in setting.keys() & self.config.overrides.keys()})
        return {"tp_size": self.num_gpus_per_engine // setting["pp_size"], **setting}

    def start_engines(self, register: bool = True) -> dict[int, list[ray.ObjectRef]]:
        """Start an actor in every empty place.

        Args:
            register: the router sends requests as soon as the server is ready; else once `SGLangEngine.register` was
                called.

        Returns:
            For each new engine (by number) references that are done when its servers are ready.
        """
        new = [index for index, engine in enumerate(self.all_engines) if engine is None]
        for index in new:
            self.all_engines[index] = self._create_actor(index)
        firsts = [index for index in new if index % self.nodes_per_engine == 0]
        self.num_new_engines += len(firsts)
        self._introduce_nodes(firsts)
        dist_ports = _DIST_PORTS if self.nodes_per_engine > 1 else 0
        addresses = get_all(
            [
                self.all_engines[index].reserve_address.remote(0 if index % self.nodes_per_engine else dist_ports)
                for index in new
            ],
            timeout=self.args.engine_start_timeout,
            what="ports for the engines",
        )
        by_index = dict(zip(new, addresses, strict=True))
        for index, address in by_index.items():
            first = by_index.get(index - index % self.nodes_per_engine)
            if first is not None:
                address["dist_init_addr"] = first["dist_init_addr"]
        router = {"router_ip": self.router.ip, "router_port": self.router.port} if register else {}
        started: dict[int, list[ray.ObjectRef]] = {}
        for index, address in by_index.items():
            ref = self.all_engines[index].init.remote(**address, **router)
            started.setdefault(index // self.nodes_per_engine, []).append(ref)
        return started

    def _introduce_nodes(self, firsts: Sequence[int]) -> None:
        """Tell each engine's first actor who the others are."""
        nodes = {index: self.all_engines[index + 1 : index + self.nodes_per_engine] for index in firsts}
        refs = [self.all_engines[index].set_other_nodes.remote(others) for index, others in nodes.items() if others]
        if refs:
            get_all(refs, timeout=self.args.engine_start_timeout, what="starting the engines' actors")

    def _create_actor(self, index: int) -> Any:
        current = accelerator.current()
        env = {**current.noset_visible_devices_env(), "SLIME_ACCELERATOR": current.name, "RAY_USE_UVLOOP": "0"}
        return (
            ray.remote(SGLangEngine)
            .options(
                **current.actor_options(ENGINE_DEVICE_FRACTION),
                max_concurrency=ENGINE_CONCURRENCY,
                runtime_env={"env_vars": env},
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self.pg.pg,
                    placement_group_bundle_index=self.pg.bundle_order[self._slot(index)],
                    placement_group_capture_child_tasks=True,
                ),
            )
            .remote(self.args, **self.actor_settings(index))
        )

    def actor_settings(self, index: int) -> dict[str, Any]:
        """What an actor is told, by its number in the group. Its place in the engine is counted within the group:
        ranks of the run begin anywhere."""
        return {
            "rank": self.rank_offset + index,
            "worker_type": self.config.worker_type,
            "base_gpu_id": self.pg.device_ids[self._slot(index)],
            "sglang_overrides": self._overrides(),
            "num_gpus_per_engine": self.num_gpus_per_engine,
            "nnodes": self.nodes_per_engine,
            "node_rank": index % self.nodes_per_engine,
        }

    def _slot(self, index: int) -> int:
        """The first device of an actor, counted over all rollout devices."""
        return self.gpu_offset + index * self.gpus_per_engine_on_node

    def _overrides(self) -> dict[str, Any]:
        overrides: dict[str, Any] = {"model_path": self.model_path}
        if self.encoder_urls and self.config.worker_type in ("regular", "prefill"):
            overrides |= {"language_only": True, "encoder_urls": self.encoder_urls}
        if self.needs_offload and not self.update_weights:
            overrides["enable_weights_cpu_backup"] = True  # nobody sends them again after they were released
        overrides |= self.config.overrides
        return overrides if self.needs_offload else {**overrides, "enable_memory_saver": False}

    def offload(self) -> list[ray.ObjectRef]:
        """Start releasing the engines' memory, where trainers need the room."""
        return [engine.release_memory_occupation.remote() for engine in self.engines] if self.needs_offload else []

    def onload(self, tags: Sequence[str] | None = None) -> list[ray.ObjectRef]:
        """Start taking memory back; tags as in SGLang (weights, kv_cache, cuda_graph)."""
        return [engine.resume_memory_occupation.remote(tags) for engine in self.engines] if self.needs_offload else []
