"""The servers of a run: one model each, with groups of engines behind a router."""

from __future__ import annotations

import dataclasses
import logging
from argparse import Namespace
from collections.abc import Iterable, Sequence
from typing import Any

import ray

from slime.backends.sglang_utils.control_client import CONTROL_SECONDS
from slime.backends.sglang_utils.sglang_config import ModelConfig, SglangConfig
from slime.backends.sglang_utils.sglang_engine import TRANSFER_SECONDS
from slime.ray.external_group import external_deployment, external_groups
from slime.ray.placement_group import Placement, placement_group_layout
from slime.ray.router import Router, start_router
from slime.ray.server_group import ServerGroup
from slime.ray.utils import get_all

logger = logging.getLogger(__name__)

REGISTER_SECONDS = 60.0
SHUTDOWN_SECONDS = 20.0


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
    def _serving_groups(self) -> list[ServerGroup]:
        """Those whose engines take requests and weights: all but encoders."""
        return [group for group in self.server_groups if group.config.worker_type != "encoder"]

    @property
    def engines(self) -> list[Any]:
        """The engines that take requests, and weights if the model is trained."""
        return [engine for group in self._serving_groups for engine in group.engines]

    @property
    def all_engines(self) -> list[Any]:
        return [engine for group in self.server_groups for engine in group.all_engines]

    @property
    def num_new_engines(self) -> int:
        return sum(group.num_new_engines for group in self._serving_groups)

    @num_new_engines.setter
    def num_new_engines(self, value: int) -> None:
        for group in self.server_groups:
            group.num_new_engines = value

    @property
    def engine_gpu_counts(self) -> list[int]:
        """Devices of each engine."""
        return [group.num_gpus_per_engine for group in self._serving_groups for _ in group.numbers]

    @property
    def engine_gpu_offsets(self) -> list[int]:
        """First device of each engine, counted over all rollout devices."""
        return [group.gpu_offset_of(number) for group in self._serving_groups for number in group.numbers]

    @property
    def engine_parallel_configs(self) -> list[dict[str, Any]]:
        return [group.parallel_config() for group in self._serving_groups for _ in group.numbers]

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
            refs = [engine.get_url.remote() for engine in self.engines]
            urls = get_all(refs, timeout=CONTROL_SECONDS, what="engine URLs")
            self.router.wait_workers(urls, REGISTER_SECONDS)
        except BaseException:
            self.kill()
            raise
        logger.info("model %s: %d engines ready behind %s", self.model_name, len(self.engines), self.router.url)

    def offload(self) -> None:
        self._wait((ref for group in self._serving_groups for ref in group.offload()), "releasing the engines' memory")

    def onload(self, tags: Sequence[str] | None = None) -> None:
        refs = (ref for group in self._serving_groups for ref in group.onload(tags))
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
    """Start a router and the engines of every model, without waiting for the engines (`RolloutServer.wait_ready`);
    encoders alone are waited for, since other engines are told their addresses.

    Sets `args.sglang_router_ip` and `args.sglang_router_port` (of the model that is trained, else the first) and
    `args.sglang_model_routers`.

    Returns:
        The servers by model name, in the order of the configuration; none with --debug-train-only.
    """
    args.sglang_model_routers = {}
    if args.debug_train_only:
        return {}
    deployment = deployment_of(args)
    servers: dict[str, RolloutServer] = {}
    offsets = GroupOffset()
    try:
        for model in deployment.models:
            is_main = model is deployment.main_model
            router = start_router(
                args, pd_disaggregation=model.has_pd_disaggregation, force_new=not is_main, model_path=model.model_path
            )
            servers[model.name] = server = RolloutServer(args, model, router, [], [])
            args.sglang_model_routers[model.name] = (router.ip, router.port)
            server.server_groups, offsets = make_groups(args, pg, model, router, offsets)
            server._init_refs = _start_groups(args, server.server_groups)
    except BaseException:
        for server in servers.values():
            server.kill()
        raise
    # Only now: a later router must not be mistaken for one that was given.
    args.sglang_router_ip, args.sglang_router_port = args.sglang_model_routers[deployment.main_model.name]
    return servers


@dataclasses.dataclass(frozen=True)
class GroupOffset:
    """Where the next group begins: rank of its first actor, and its first device."""

    rank: int = 0
    gpu: int = 0


def deployment_of(args: Namespace) -> SglangConfig:
    """The models to serve, external engines included."""
    return external_deployment(args) if getattr(args, "rollout_external", False) else SglangConfig.from_args(args)


def make_groups(
    args: Namespace, pg: Placement, model: ModelConfig, router: Router, offset: GroupOffset
) -> tuple[list[ServerGroup], GroupOffset]:
    """The groups of a model, with no engine started, and where those of the next model begin.

    A placeholder takes devices, but no ranks.
    """
    if getattr(args, "rollout_external", False):
        return list(external_groups(args, pg, router)), offset
    groups = []
    for config in model.server_groups:
        if config.worker_type != "placeholder":
            group = ServerGroup(
                args, pg, config, model.model_path, router, offset.rank, offset.gpu,
                needs_offload=_shares_devices(args, offset.gpu), update_weights=model.update_weights,
            )  # fmt: skip
            groups.append(group)
            offset = dataclasses.replace(offset, rank=offset.rank + len(group.all_engines))
        offset = dataclasses.replace(offset, gpu=offset.gpu + config.num_gpus)
    return groups, offset


def _start_groups(args: Namespace, groups: list[ServerGroup]) -> list[ray.ObjectRef]:
    """Start engines, the encoders first; references that are done when the others are ready."""
    encoders = [group for group in groups if group.config.worker_type == "encoder"]
    get_all(_start(encoders), timeout=args.engine_start_timeout + REGISTER_SECONDS, what="starts of encoders")
    refs = [engine.get_url.remote() for group in encoders for engine in group.engines]
    urls = get_all(refs, timeout=CONTROL_SECONDS, what="URLs of encoders")
    others = [group for group in groups if group not in encoders]
    for group in others:
        group.encoder_urls = urls
    return _start(others)


def _start(groups: list[ServerGroup]) -> list[ray.ObjectRef]:
    return [ref for group in groups for refs in group.start_engines().values() for ref in refs]


def _shares_devices(args: Namespace, gpu_offset: int) -> bool:
    """Whether a group that begins at this rollout device must make room for trainers."""
    trainers = 0 if args.debug_rollout_only else args.actor_num_nodes * args.actor_num_gpus_per_node
    return bool(args.offload_rollout) and placement_group_layout(args).rollout_offset + gpu_offset < trainers
