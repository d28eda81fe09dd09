"""One bundle per device, in one placement group; which bundles train and which serve."""

from __future__ import annotations

import ipaddress
import logging
import socket
from argparse import Namespace
from collections import defaultdict
from typing import NamedTuple

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slime.ray.utils import get_all
from slime.utils import accelerator

logger = logging.getLogger(__name__)

PLACEMENT_LOG_INTERVAL_S = 30
PROBE_TIMEOUT_S = 300


class Layout(NamedTuple):
    """`total` bundles, of which the rollout engines start at `rollout_offset`."""

    total: int
    rollout_offset: int


class Placement(NamedTuple):
    """Bundles in device order: bundle indices and, in step with them, each device's index on its node."""

    pg: PlacementGroup | None
    bundle_order: list[int]
    device_ids: list[int]

    def from_offset(self, offset: int) -> Placement:
        return Placement(self.pg, self.bundle_order[offset:], self.device_ids[offset:])


def placement_group_layout(args: Namespace) -> Layout:
    """How many bundles the run takes and where the engines' begin.

    | mode               | total                | offset |
    |--------------------|----------------------|--------|
    | debug_train_only   | actor                | 0      |
    | external engines   | actor                | actor (0 with debug_rollout_only) |
    | debug_rollout_only | rollout              | 0      |
    | colocate           | max(actor, rollout)  | 0      |
    | disaggregated      | actor + rollout      | actor  |
    """
    actor = args.actor_num_nodes * args.actor_num_gpus_per_node
    rollout = args.rollout_num_gpus or 0
    if args.debug_train_only:
        return Layout(actor, 0)
    if getattr(args, "rollout_external", False):
        return Layout(actor, 0 if args.debug_rollout_only else actor)
    if args.debug_rollout_only:
        return Layout(rollout, 0)
    if args.colocate:
        return Layout(max(actor, rollout), 0)
    return Layout(actor + rollout, actor)


def address_key(address: str) -> tuple[int, int | str]:
    """Sort key of a node address: IPs by number, IPv4 before IPv6; names that don't resolve come last, by name."""
    try:
        ip = ipaddress.ip_address(address.strip("[]"))
    except ValueError:
        try:
            ip = ipaddress.ip_address(socket.gethostbyname(address))
        except OSError:
            return (7, address)
    return (ip.version, int(ip))


class _DeviceProbe:
    """Runs in a bundle and tells its devices."""

    def device_ids(self) -> list[int]:
        return accelerator.current().assigned_device_ids()


def _node_addresses(pg: PlacementGroup) -> list[str]:
    """Address of the node of each bundle, by bundle index."""
    address = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    nodes = placement_group_table(pg)["bundles_to_node_id"]
    return [address[nodes[index]] for index in range(len(nodes))]


def _probe_device_ids(pg: PlacementGroup, count: int) -> list[int]:
    """Ask an actor in each bundle which device Ray has given it."""
    probes = [
        ray.remote(_DeviceProbe)
        .options(
            **accelerator.current().actor_options(1.0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(pg, placement_group_bundle_index=index),
        )
        .remote()
        for index in range(count)
    ]
    ids = get_all([probe.device_ids.remote() for probe in probes], timeout=PROBE_TIMEOUT_S, what="device probes")
    for probe in probes:
        ray.kill(probe)
    return [int(own[0]) for own in ids]


def _number_per_node(addresses: list[str]) -> list[int]:
    """Devices without ids of their own are numbered on each node in bundle order."""
    seen: dict[str, int] = defaultdict(int)
    ids = []
    for address in addresses:
        ids.append(seen[address])
        seen[address] += 1
    return ids


def sort_bundles(addresses: list[str], device_ids: list[int]) -> list[int]:
    """Bundle indices in the order (node address, device index)."""
    return sorted(range(len(addresses)), key=lambda i: (address_key(addresses[i]), device_ids[i]))


def _wait_placed(pg: PlacementGroup, count: int) -> None:
    waited = 0
    while not pg.wait(PLACEMENT_LOG_INTERVAL_S):
        waited += PLACEMENT_LOG_INTERVAL_S
        logger.warning(
            "waited %d s for a placement group of %d x %s; free now: %s",
            waited, count, accelerator.current().bundle(), ray.available_resources(),
        )  # fmt: skip


def _create_placement_group(count: int) -> Placement:
    if count == 0:
        return Placement(None, [], [])
    current = accelerator.current()
    pg = placement_group([current.bundle()] * count, strategy="PACK")
    _wait_placed(pg, count)
    addresses = _node_addresses(pg)
    has_ids = current.visible_devices_env is not None
    device_ids = _probe_device_ids(pg, count) if has_ids else _number_per_node(addresses)
    order = sort_bundles(addresses, device_ids)
    for position, index in enumerate(order):
        logger.debug("device %d: bundle %d on %s, id %d", position, index, addresses[index], device_ids[index])
    return Placement(pg, order, [device_ids[index] for index in order])


def create_placement_groups(args: Namespace) -> dict[str, Placement]:
    """The bundles of `actor` and `rollout`, and of `critic` (those of the actor) when there is one."""
    layout = placement_group_layout(args)
    everything = _create_placement_group(layout.total)
    groups = {"actor": everything, "rollout": everything.from_offset(layout.rollout_offset)}
    return groups | {"critic": everything} if getattr(args, "use_critic", False) else groups
