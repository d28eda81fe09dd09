"""The engines of a run: groups of equal engines, and the servers (one router each) that they form."""

from __future__ import annotations

import dataclasses
import logging
from argparse import Namespace
from collections.abc import Iterable, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slime.backends.sglang_utils.sglang_config import ModelConfig, ServerGroupConfig, SglangConfig
from slime.backends.sglang_utils.sglang_engine import CONTROL_SECONDS, TRANSFER_SECONDS, SGLangEngine
from slime.ray.placement_group import Placement, placement_group_layout
from slime.ray.router import Router, start_router
from slime.ray.utils import get_all
from slime.utils import accelerator

logger = logging.getLogger(__name__)

# A trainer and an engine share a device when colocated, so neither may ask for all of it.
ENGINE_DEVICE_FRACTION = 0.2
# A request that waits for the server must not keep a health probe or the shutdown waiting.
ENGINE_CONCURRENCY = 8
REGISTER_SECONDS = 60.0
SHUTDOWN_SECONDS = 20.0
_DIST_PORTS = 30  # SGLang takes ports after its rendezvous port for each data-parallel rank


@dataclasses.dataclass
class ServerGroup:
    """Engines of one kind and size on consecutive devices.

    Attributes:
        pg: the devices of all rollout engines.
        rank_offset: rank of the first engine actor of this group among all of the run.
        gpu_offset: its first device in `pg`.
        needs_offload: its devices are shared with trainers.
        all_engines: actors, one per node of each engine; None where one is to be started.
        num_new_engines: engines that have not been sent weights since they started.
    """

    args: Namespace
    pg: Placement
    config: ServerGroupConfig
    model_path: str
    router: Router
    rank_offset: int
    gpu_offset: int
    needs_offload: bool
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
    def engines(self) -> list[Any]:
        """The actors that serve HTTP: the first node's of each engine."""
        return self.all_engines[:: self.nodes_per_engine]

    def parallel_config(self) -> dict[str, Any]:
        """How each engine is laid out."""
        setting = {name: getattr(self.args, f"sglang_{name}", None) or 1 for name in ("pp_size", "dp_size", "ep_size")}
        setting.update({name: self.config.overrides[name] for name in setting.keys() & self.config.overrides.keys()})
        return {"tp_size": self.num_gpus_per_engine // setting["pp_size"], **setting}

    def start_engines(self) -> list[ray.ObjectRef]:
        """Start an actor in every empty place; references that are done when its server is ready and registered."""
        new = [index for index, engine in enumerate(self.all_engines) if engine is None]
        for index in new:
            self.all_engines[index] = self._create_actor(index)
        firsts = [index for index in new if index % self.nodes_per_engine == 0]
        self.num_new_engines += len(firsts)
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
        return [
            self.all_engines[index].init.remote(**address, router_ip=self.router.ip, router_port=self.router.port)
            for index, address in by_index.items()
        ]

    def _create_actor(self, index: int) -> Any:
        current = accelerator.current()
        slot = self.gpu_offset + index * self.gpus_per_engine_on_node
        overrides = {"model_path": self.model_path, **self.config.overrides}
        if not self.needs_offload:
            overrides["enable_memory_saver"] = False
        env = {**current.noset_visible_devices_env(), "SLIME_ACCELERATOR": current.name, "RAY_USE_UVLOOP": "0"}
        return (
            ray.remote(SGLangEngine)
            .options(
                **current.actor_options(ENGINE_DEVICE_FRACTION),
                max_concurrency=ENGINE_CONCURRENCY,
                runtime_env={"env_vars": env},
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self.pg.pg,
                    placement_group_bundle_index=self.pg.bundle_order[slot],
                    placement_group_capture_child_tasks=True,
                ),
            )
            .remote(
                self.args,
                rank=self.rank_offset + index,
                worker_type=self.config.worker_type,
                base_gpu_id=self.pg.device_ids[slot],
                sglang_overrides=overrides,
                num_gpus_per_engine=self.num_gpus_per_engine,
                nnodes=self.nodes_per_engine,
                node_rank=index % self.nodes_per_engine,
            )
        )

    def offload(self) -> list[ray.ObjectRef]:
        """Start releasing the engines' memory, where trainers need the room."""
        return [engine.release_memory_occupation.remote() for engine in self.engines] if self.needs_offload else []

    def onload(self, tags: Sequence[str] | None = None) -> list[ray.ObjectRef]:
        """Start taking memory back; tags as in SGLang (weights, kv_cache, cuda_graph)."""
        return [engine.resume_memory_occupation.remote(tags) for engine in self.engines] if self.needs_offload else []


class RolloutServer:
    """One model behind one router.

    Args:
        init_refs: what `ServerGroup.start_engines` returned; awaited by `wait_ready`.
    """

    def __init__(
        self, args: Namespace, model: ModelConfig, router: Router, groups: list[ServerGroup], init_refs: list[Any]
    ) -> None:
        self.args = args
        self.model_name = model.name
        self.update_weights = model.update_weights
        self.router = router
        self.server_groups = groups
        self._init_refs = init_refs

    @property
    def engines(self) -> list[Any]:
        return [engine for group in self.server_groups for engine in group.engines]

    @property
    def all_engines(self) -> list[Any]:
        return [engine for group in self.server_groups for engine in group.all_engines]

    @property
    def num_new_engines(self) -> int:
        return sum(group.num_new_engines for group in self.server_groups)

    @num_new_engines.setter
    def num_new_engines(self, value: int) -> None:
        for group in self.server_groups:
            group.num_new_engines = value

    @property
    def engine_gpu_counts(self) -> list[int]:
        """Devices of each engine."""
        return [group.num_gpus_per_engine for group in self.server_groups for _ in group.engines]

    @property
    def engine_gpu_offsets(self) -> list[int]:
        """First device of each engine, counted over all rollout devices."""
        return [
            group.gpu_offset + index * group.num_gpus_per_engine
            for group in self.server_groups
            for index in range(len(group.engines))
        ]

    @property
    def engine_parallel_configs(self) -> list[dict[str, Any]]:
        return [group.parallel_config() for group in self.server_groups for _ in group.engines]

    def wait_ready(self) -> None:
        """Wait until every engine generates and the router sends it requests.

        Everything that was started ends when one fails.

        Raises:
            ServerStartError, RouterError: (as the cause of Ray's error) with the log's path and last lines.
        """
        try:
            limit = self.args.engine_start_timeout + REGISTER_SECONDS
            get_all(self._init_refs, timeout=limit, what="engine starts")
            self._init_refs = []
            registered = [group for group in self.server_groups if group.config.worker_type != "encoder"]
            refs = [engine.get_url.remote() for group in registered for engine in group.engines]
            urls = get_all(refs, timeout=CONTROL_SECONDS, what="engine URLs")
            self.router.wait_workers(urls, REGISTER_SECONDS)
        except BaseException:
            self.kill()
            raise
        logger.info("model %s: %d engines ready behind %s", self.model_name, len(self.engines), self.router.url)

    def offload(self) -> None:
        self._wait((ref for group in self.server_groups for ref in group.offload()), "releasing the engines' memory")

    def onload(self, tags: Sequence[str] | None = None) -> None:
        refs = (ref for group in self.server_groups for ref in group.onload(tags))
        self._wait(refs, "taking back the engines' memory")

    def onload_weights(self) -> None:
        self.onload(["weights"])

    def onload_kv(self) -> None:
        self.onload(["kv_cache", "cuda_graph"])

    def check_weights(self, action: str) -> list[Any]:
        """Run a weight check on every engine (see `SGLangEngine.check_weights`); their results."""
        refs = [engine.check_weights.remote(action) for engine in self.engines]
        return get_all(refs, timeout=TRANSFER_SECONDS, what=f"weight check {action}")

    def watch(self) -> list[ray.ObjectRef]:
        """References that fail as soon as an engine's server dies, and are done when it has been shut down."""
        return [engine.watch.remote() for engine in self.all_engines if engine is not None]

    def shutdown(self) -> None:
        """Take the engines out of the router and end them and it; what does not end in time is killed."""
        refs = [engine.shutdown.remote() for engine in self.all_engines if engine is not None]
        _, late = ray.wait(refs, num_returns=len(refs), timeout=SHUTDOWN_SECONDS) if refs else ([], [])
        if late:
            logger.warning("%d engines did not end within %.0f s and are killed", len(late), SHUTDOWN_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End engines and router at once; the servers end with their actors."""
        for engine in self.all_engines:
            if engine is not None:
                ray.kill(engine)
        for group in self.server_groups:
            group.all_engines = [None] * len(group.all_engines)
        self.router.stop()

    @staticmethod
    def _wait(refs: Iterable[Any], what: str) -> None:
        get_all(list(refs), timeout=TRANSFER_SECONDS, what=what)


def start_rollout_servers(args: Namespace, pg: Placement) -> dict[str, RolloutServer]:
    """Start a router and the engines of every model, without waiting for the engines (`RolloutServer.wait_ready`).

    Sets `args.sglang_router_ip` and `args.sglang_router_port` (of the first model) and `args.sglang_model_routers`.

    Returns:
        The servers by model name, in the order of the configuration; none with --debug-train-only.
    """
    args.sglang_model_routers = {}
    if args.debug_train_only:
        return {}
    servers: dict[str, RolloutServer] = {}
    rank_offset = gpu_offset = 0
    try:
        for model in SglangConfig.from_args(args).models:
            router = start_router(args, pd_disaggregation=model.has_pd_disaggregation, force_new=bool(servers))
            server = RolloutServer(args, model, router, [], [])
            servers[model.name] = server
            if not args.sglang_model_routers:
                args.sglang_router_ip, args.sglang_router_port = router.ip, router.port
            args.sglang_model_routers[model.name] = (router.ip, router.port)
            for config in model.server_groups:
                if config.worker_type != "placeholder":
                    group = ServerGroup(
                        args, pg, config, model.model_path, router, rank_offset, gpu_offset,
                        needs_offload=_shares_devices(args, gpu_offset),
                    )  # fmt: skip
                    server.server_groups.append(group)
                    server._init_refs += group.start_engines()
                    rank_offset += len(group.all_engines)
                gpu_offset += config.num_gpus
    except BaseException:
        for server in servers.values():
            server.kill()
        raise
    return servers


def _shares_devices(args: Namespace, gpu_offset: int) -> bool:
    """Whether a group that begins at this rollout device must make room for trainers."""
    trainers = 0 if args.debug_rollout_only else args.actor_num_nodes * args.actor_num_gpus_per_node
    return bool(args.offload_rollout) and placement_group_layout(args).rollout_offset + gpu_offset < trainers
