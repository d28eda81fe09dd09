"""Engines that others have started: actors without devices that speak to them, in the place of a server group."""

from __future__ import annotations

import ipaddress
import socket
from argparse import Namespace
from typing import Any
from urllib.parse import urlsplit

import ray

from slime.backends.sglang_utils.external import ExternalEngineInfo, external_engine_infos_from_args
from slime.backends.sglang_utils.external_engine import ExternalEngine
from slime.backends.sglang_utils.sglang_config import ACTOR, ModelConfig, ServerGroupConfig, SglangConfig
from slime.ray.placement_group import Placement
from slime.ray.router import Router
from slime.ray.server_group import ENGINE_CONCURRENCY, ServerGroup


class ExternalGroup(ServerGroup):
    """One server that others run. It has no devices of the run, sleeps never, and outlives the run.

    With fault tolerance a server that fails is taken out like an engine of our own; in its place it is attached again,
    with the current weights, if it answers when weights are sent.
    """

    info: ExternalEngineInfo

    @classmethod
    def of(cls, args: Namespace, pg: Placement, info: ExternalEngineInfo, router: Router, rank: int) -> ExternalGroup:
        config = ServerGroupConfig(info.num_gpus, info.num_gpus, info.worker_type)
        group = cls(args, pg, config, args.hf_checkpoint, router, rank, gpu_offset=0, needs_offload=False)
        group.info = info
        return group

    def __post_init__(self) -> None:
        self.all_engines = [None]

    @property
    def gpus_per_engine_on_node(self) -> int:
        return self.num_gpus_per_engine

    @property
    def nodes_per_engine(self) -> int:
        """On however many nodes the server runs, one actor speaks to it."""
        return 1

    def parallel_config(self) -> dict[str, Any]:
        return self.info.parallel_config

    def start_engines(self, register: bool = True) -> dict[int, list[ray.ObjectRef]]:
        """Attach to the server unless that has been done; see `ServerGroup.start_engines`."""
        if self.all_engines[0] is not None:
            return {}
        needs_host = getattr(self.args, "update_weight_local_checkpoint_dir", None) is not None
        remote = ray.remote(ExternalEngine).options(
            num_cpus=0, max_concurrency=ENGINE_CONCURRENCY, resources=on_host(self.info.url) if needs_host else None
        )
        self.all_engines = [remote.remote(self.args, self.rank_offset, self.info)]
        self.num_new_engines += 1
        router = {"router_ip": self.router.ip, "router_port": self.router.port} if register else {}
        return {0: [self.all_engines[0].attach.remote(**router)]}


def external_deployment(args: Namespace) -> SglangConfig:
    """The actor's model on the servers that were found."""
    infos = external_engine_infos_from_args(args)
    groups = tuple(ServerGroupConfig(info.num_gpus, info.num_gpus, info.worker_type) for info in infos)
    return SglangConfig((ModelConfig(ACTOR, args.hf_checkpoint, groups),))


def external_groups(args: Namespace, pg: Placement, router: Router) -> list[ExternalGroup]:
    """A group per server, with no actor started."""
    infos = external_engine_infos_from_args(args)
    return [ExternalGroup.of(args, pg, info, router, rank) for rank, info in enumerate(infos)]


def on_host(url: str) -> dict[str, float]:
    """What an actor asks Ray for to run on a server's host, whose files it is to write.

    Raises:
        RuntimeError: there is no Ray node.
    """
    host = str(urlsplit(url).hostname)
    addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    if any(ipaddress.ip_address(address).is_loopback for address in addresses):
        addresses = {ray.util.get_node_ip_address()}
    nodes = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    if not addresses & nodes:
        raise RuntimeError(
            f"--update-weight-local-checkpoint-dir is a folder on the host of {url}, where no Ray node is: "
            f"there are {', '.join(sorted(nodes))} (run `ray start` there, or leave the flag out)"
        )
    return {f"node:{(addresses & nodes).pop()}": 0.001}
