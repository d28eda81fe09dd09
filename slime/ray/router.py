"""The router in front of a model's engines: start one, or use one that runs, and wait for its workers."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slime.backends.sglang_utils.control_client import ControlClient, ControlError
from slime.ray.guard import GuardedProcess, spawn_guarded
from slime.ray.ports import HeldPorts, bracket_host, hold_port, hold_ports
from slime.utils.host_info import get_host_info

logger = logging.getLogger(__name__)

FIRST_PORT, FIRST_METRICS_PORT = 3000, 4000
START_SECONDS = 60.0
REQUEST_SECONDS = 10.0
_POLL_SECONDS = 0.05
SGLANG_ROUTER, SLIME_ROUTER = "slime.ray.router_process", "slime.router.process"
_PROXY_VARIABLES = ("http_proxy", "https_proxy", "all_proxy")


class RouterError(RuntimeError):
    """The router did not start, has ended, or misses workers; with its log's path and last lines."""


class Router:
    """A router, which ends with the process that holds this object when slime has started it.

    Args:
        spawn: starts its process; None for a router that others run.

    Attributes:
        ip: its host as it stands in a URL (IPv6 in brackets).
        port: where it listens.
    """

    def __init__(self, ip: str, port: int, spawn: Callable[[], GuardedProcess] | None = None) -> None:
        self.ip = bracket_host(ip)
        self.port = port
        self._spawn = spawn
        self._process = None if spawn is None else spawn()
        self._client = ControlClient(self.url)

    @property
    def url(self) -> str:
        return f"http://{self.ip}:{self.port}"

    def wait_ready(self, timeout: float = START_SECONDS) -> None:
        """Wait until it answers.

        Raises:
            RouterError: it ended, or does not answer after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while not self._client.answers("/liveness", timeout=REQUEST_SECONDS):
            if self.has_ended:
                raise RouterError(f"the router at {self.url} ended while starting{self._where_to_look()}")
            if time.monotonic() > deadline:
                raise RouterError(f"the router at {self.url}: no answer after {timeout:.0f} s{self._where_to_look()}")
            time.sleep(_POLL_SECONDS)

    @property
    def has_ended(self) -> bool:
        """Whether the process that slime started for it is gone."""
        return self._process is not None and self._process.poll() is not None

    def restart(self) -> None:
        """Start it again, at the same address; it knows no workers then.

        Raises:
            RouterError: it does not start.
        """
        assert self._spawn is not None
        self._process = self._spawn()
        self.wait_ready()

    def workers(self) -> list[dict[str, Any]]:
        """What the router knows of each worker: id, url, is_healthy, load, ..."""
        return self._client.get("/workers", timeout=REQUEST_SECONDS)["workers"]

    def wait_workers(self, urls: Sequence[str], timeout: float) -> None:
        """Wait until every one of `urls` is registered and healthy.

        Raises:
            RouterError: naming those that are not after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while True:
            healthy = {worker["url"] for worker in self.workers() if worker["is_healthy"]}
            missing = [url for url in urls if url not in healthy]
            if not missing:
                return
            if time.monotonic() > deadline:
                raise RouterError(
                    f"the router at {self.url} has no healthy worker {', '.join(missing)} "
                    f"after {timeout:.0f} s{self._where_to_look()}"
                )
            time.sleep(_POLL_SECONDS)

    def stop(self) -> None:
        """End the router if slime has started it."""
        if self._process is not None:
            self._process.terminate()

    def _where_to_look(self) -> str:
        if self._process is None:
            return " (it was given with --sglang-router-ip)"
        return f"\nlog of the router: {self._process.log_path}, last lines:\n{self._process.log_tail()}"


def register_worker(router_url: str, worker: dict[str, Any]) -> None:
    """Tell a router of a worker: its url and worker_type, for a prefill worker also its bootstrap_port.

    Raises:
        ControlError: naming URL and answer.
    """
    ControlClient(router_url).post("/workers", worker, timeout=REQUEST_SECONDS)


def deregister_worker(router_url: str, worker_url: str) -> None:
    """Make a router forget a worker; a router that is gone, or never knew it, is fine."""
    client = ControlClient(router_url)
    try:
        for worker in client.get("/workers", timeout=REQUEST_SECONDS)["workers"]:
            if worker["url"] == worker_url:
                client.request("DELETE", f"/workers/{worker['id']}", timeout=REQUEST_SECONDS)
    except ControlError as error:
        logger.warning("could not take %s out of the router: %s", worker_url, error)


def start_router(
    args: Namespace, *, pd_disaggregation: bool = False, force_new: bool = False, model_path: str = ""
) -> Router:
    """The router for a model's engines, once it answers: sglang-router, or slime's own with --use-slime-router.

    With --sglang-router-ip the running one is used, unless `force_new` asks for another (a second model's).

    Args:
        model_path: the folder with the model's tokenizer, for slime's own router.

    Raises:
        OSError: --sglang-router-port is in use.
        RouterError: it does not start.
    """
    if args.sglang_router_ip is not None and not force_new:
        router = Router(args.sglang_router_ip, args.sglang_router_port)
    else:
        port = None if force_new else args.sglang_router_port
        router = _launch(args, pd_disaggregation, port, model_path)
    router.wait_ready()
    return router


def _launch(args: Namespace, pd_disaggregation: bool, port: int | None, model_path: str) -> Router:
    host = get_host_info()[1]
    held = hold_ports(1, FIRST_PORT) if port is None else hold_port(port, "--sglang-router-port")
    with held, hold_ports(1, FIRST_METRICS_PORT) as metrics:
        settings: dict[str, Any]
        if getattr(args, "use_slime_router", False):
            module, settings = SLIME_ROUTER, slime_router_settings(args, host, held, model_path)
        else:
            module, settings = SGLANG_ROUTER, router_settings(args, host, held, metrics, pd_disaggregation)
        log_path = Path(args.log_dir) / f"router-{held.ports[0]}.log"
        log_path.parent.mkdir(parents=True, exist_ok=True)
        settings_path = log_path.with_suffix(".json")
        settings_path.write_text(json.dumps(settings, indent=1))
        # A proxy would capture the requests to the engines.
        env = {name: value for name, value in os.environ.items() if name.lower() not in _PROXY_VARIABLES}
        command = [sys.executable, "-m", module, str(settings_path)]
        router = Router(host, held.ports[0], lambda: spawn_guarded(command, env, log_path))
        try:
            router.wait_ready()
        except RouterError:
            router.stop()
            raise
    return router


def router_settings(
    args: Namespace, host: str, held: HeldPorts, metrics: HeldPorts, pd_disaggregation: bool
) -> dict[str, dict[str, Any]]:
    """What the router's process is told: the user's --router-* flags, and what slime works out."""
    flags = {name: value for name, value in vars(args).items() if name.startswith("router_")}
    flags.setdefault("router_policy", "round_robin")  # its own default sends requests with token ids to one worker
    owned = {
        "host": bracket_host(host),  # it is joined to the port as text; the other one is parsed alone
        "port": held.ports[0],
        "prometheus_host": host,
        "prometheus_port": metrics.ports[0],
        "pd_disaggregation": pd_disaggregation,
        "request_timeout_secs": args.sglang_router_request_timeout_secs,
        # The health monitor takes engines out; a router that drops one that is busy or paused loses samples.
        "disable_health_check": True,
        "disable_circuit_breaker": True,
    }
    return {"flags": flags, "owned": owned}


def slime_router_settings(args: Namespace, host: str, held: HeldPorts, model_path: str) -> dict[str, Any]:
    """What the process of slime's own router is told."""
    return {
        "host": host,
        "port": held.ports[0],
        "request_timeout_secs": args.sglang_router_request_timeout_secs,
        "model_path": model_path,
        "middlewares": args.slime_router_middleware_paths or [],
    }
