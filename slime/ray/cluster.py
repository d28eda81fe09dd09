"""Joins a running Ray cluster or starts one on this machine, and checks that it has the devices that a run needs."""

from __future__ import annotations

import logging
import os
import signal
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from slime.ray.failures import report_failure
from slime.utils import accelerator

logger = logging.getLogger(__name__)

MANAGER_CPUS = 1
STOPPED_STATUS = 130  # what shells report for a program that Ctrl-C has ended


class NotEnoughDevices(RuntimeError):
    """The cluster has fewer devices than the run asks for."""


def devices_needed(args: Namespace) -> int:
    """Devices of the placement group (surface: one bundle per device)."""
    from slime.ray.placement_group import placement_group_layout

    return placement_group_layout(args).total


def _connect(args: Namespace) -> None:
    """Join the cluster that RAY_ADDRESS names or `ray start` has started here; else start one that ends with the run.

    On a CPU a "device" is a share of the machine, so a cluster of our own is told to have as many as the run asks for;
    real accelerators are counted by Ray.
    """
    num_cpus = os.cpu_count() or 1
    if accelerator.current().ray_resource == "CPU":
        num_cpus = max(num_cpus, devices_needed(args) + MANAGER_CPUS)
    address = os.environ.get("RAY_ADDRESS") or None
    if address in (None, "local"):
        try:
            ray.init(num_cpus=num_cpus, include_dashboard=False, logging_level=logging.WARNING)
        except ValueError:  # what Ray says to `num_cpus` when there is a cluster to join
            ray.init(logging_level=logging.WARNING)
        else:
            logger.info("started a local Ray cluster with %s", _describe(ray.cluster_resources()))
            return
    else:
        ray.init(address=address, logging_level=logging.WARNING)
    logger.info("joined the Ray cluster at %s", ray.get_runtime_context().gcs_address)


def _describe(resources: dict[str, float]) -> str:
    wanted = {"CPU", accelerator.current().ray_resource}
    return ", ".join(f"{int(resources.get(name, 0))} {name}" for name in sorted(wanted))


def _check_devices(args: Namespace) -> None:
    current = accelerator.current()
    needed = devices_needed(args)
    cpus_needed = MANAGER_CPUS + needed * current.bundle().get("CPU", 0)
    have = ray.cluster_resources()
    short = {}
    if have.get(current.ray_resource, 0) < needed:
        short[current.ray_resource] = needed
    if have.get("CPU", 0) < cpus_needed:
        short["CPU"] = int(cpus_needed)
    if short:
        asked = ", ".join(f"{count} {name}" for name, count in short.items())
        raise NotEnoughDevices(
            f"the run asks for {asked}, but the Ray cluster has {_describe(have)} "
            f"(--actor-num-nodes {args.actor_num_nodes} x --actor-num-gpus-per-node {args.actor_num_gpus_per_node}, "
            f"--rollout-num-gpus {args.rollout_num_gpus}, --colocate {args.colocate}; "
            f"{MANAGER_CPUS} CPU is for the rollout manager)"
        )


def _terminate(signum: int, frame: object) -> None:
    raise KeyboardInterrupt(f"signal {signal.Signals(signum).name}")


@contextmanager
def cluster(args: Namespace) -> Iterator[None]:
    """Connect to Ray for the length of a run; SIGTERM ends the run like Ctrl-C, with exit status 130.

    Whatever else is raised inside is reported once (`report_failure`) and ends the process with status 1.

    Raises:
        SystemExit: also when the cluster is too small, naming how many devices were asked for and how many there are.
    """
    owned = not ray.is_initialized()
    try:
        if owned:
            _connect(args)
        signal.signal(signal.SIGTERM, _terminate)  # after ray.init, which installs a handler of its own
        _check_devices(args)
        yield
    except NotEnoughDevices as error:
        raise SystemExit(f"slime: error: {error}") from None
    except KeyboardInterrupt as signalled:
        logger.warning("stopped by %s: ending every process of the run", str(signalled) or "Ctrl-C")
        raise SystemExit(STOPPED_STATUS) from None
    except Exception as error:
        report_failure(args, error)
        raise SystemExit(1) from None
    finally:
        if owned:
            ray.shutdown()
