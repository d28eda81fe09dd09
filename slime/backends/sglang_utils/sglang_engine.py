"""The Ray actor that owns one SGLang server and speaks to its control endpoints (sglang 0.5.23).

It imports neither torch nor SGLang, so that it stays small. Only an engine's first node serves HTTP: on the others the
methods that send a request do nothing and return None.
"""

from __future__ import annotations

import logging
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slime.backends.sglang_utils.control_client import CONTROL_SECONDS, ControlError
from slime.backends.sglang_utils.engine_weights import EngineWeights
from slime.backends.sglang_utils.server_args import EngineAddress, EngineShape, compute_layers
from slime.backends.sglang_utils.server_process import ServerProcess
from slime.observability.log_setup import configure_logger
from slime.ray.ports import HeldPorts, hold_ports, host_port
from slime.ray.ray_actor import RayActor
from slime.ray.router import deregister_worker, register_worker
from slime.utils import accelerator
from slime.utils.host_info import get_host_info

logger = logging.getLogger(__name__)

FIRST_PORT = 15000
TRANSFER_SECONDS = 600.0  # a request that moves much memory
MEMORY_TAGS = ("weights", "kv_cache", "cuda_graph")
_POLL_SECONDS = 0.1


class SGLangEngine(EngineWeights, RayActor):
    """One node's part of an engine.

    Args:
        rank: number of this actor among all engine actors; seeds the server's sampling.
        worker_type: regular, prefill, decode or encoder.
        base_gpu_id: the first of its devices on this node.
        sglang_overrides: `ServerArgs` fields of its group.
        num_gpus_per_engine: devices of the whole engine; default args.rollout_num_gpus_per_engine.
        nnodes, node_rank: how many nodes the engine spans, and which of them this is.
    """

    def __init__(
        self,
        args: Namespace,
        rank: int,
        worker_type: str = "regular",
        base_gpu_id: int | None = None,
        sglang_overrides: Mapping[str, Any] | None = None,
        num_gpus_per_engine: int | None = None,
        nnodes: int = 1,
        node_rank: int = 0,
    ) -> None:
        self.overrides = dict(sglang_overrides or {})
        shape = EngineShape(
            num_gpus=num_gpus_per_engine or args.rollout_num_gpus_per_engine,
            nnodes=nnodes,
            node_rank=node_rank,
            base_gpu_id=accelerator.current().local_index(base_gpu_id or 0),
            worker_type=worker_type,
        )
        self._set_up(args, rank, shape)

    def _set_up(self, args: Namespace, rank: int, shape: EngineShape) -> None:
        """What also an actor without devices has."""
        configure_logger(args, f"engine-{rank}")
        self.args = args
        self.rank = rank
        self.shape = shape
        self._held: list[HeldPorts] = []
        self._server: ServerProcess | None = None
        self._router_url: str | None = None
        self._bootstrap_port: int | None = None
        self._told_release_frees_nothing = False
        self._asleep: set[str] = set()
        self.set_up_weights()

    # -- start and end ------------------------------------------------------------------------------------------------

    def reserve_address(self, num_dist_ports: int = 0) -> dict[str, Any]:
        """Find and hold this engine's ports on this node: keyword arguments for `init`.

        Args:
            num_dist_ports: consecutive ports for the rendezvous of an engine that spans nodes, on its first node.
        """
        host = get_host_info()[1]
        single = hold_ports(3, FIRST_PORT)
        self._held.append(single)
        port, nccl_port, bootstrap_port = single.ports
        dist_init_addr = None
        if num_dist_ports:
            run = hold_ports(num_dist_ports, FIRST_PORT, consecutive=True)
            self._held.append(run)
            dist_init_addr = host_port(host, run.ports[0])
        return {
            "host": host,
            "port": port,
            "nccl_port": nccl_port,
            "dist_init_addr": dist_init_addr,
            "disaggregation_bootstrap_port": bootstrap_port,
        }

    def init(
        self,
        dist_init_addr: str | None,
        port: int,
        nccl_port: int,
        host: str | None = None,
        disaggregation_bootstrap_port: int | None = None,
        router_ip: str | None = None,
        router_port: int | None = None,
    ) -> None:
        """Start the server, wait until it generates, and register it with the router if one is given.

        Raises:
            ServerStartError: it ended or is not ready after args.engine_start_timeout; with its log's last lines.
            ControlError: the router refuses it.
        """
        current = accelerator.current()
        address = EngineAddress(
            host=(host or get_host_info()[1]).strip("[]"),
            port=port,
            nccl_port=nccl_port,
            dist_init_addr=dist_init_addr,
            bootstrap_port=disaggregation_bootstrap_port,
        )
        layers = compute_layers(
            self.args, self.rank, self.shape, address, current.engine_server_args(), self.overrides
        )
        log_path = Path(self.args.log_dir) / f"sglang-{self.rank}-{port}.log"
        self._server = ServerProcess(layers, current.engine_env(), log_path)
        self._bootstrap_port = disaggregation_bootstrap_port
        if self.shape.node_rank == 0:
            self._wait_ready()
            if router_ip is not None:
                self.register(router_ip, router_port)

    def _wait_ready(self) -> None:
        server = self._started_server()
        started = time.monotonic()
        server.wait_ready(self.args.engine_start_timeout)
        self._release_ports()
        logger.info("engine %d is ready at %s after %.1f s", self.rank, server.url, time.monotonic() - started)

    def register(self, router_ip: str, router_port: int | None) -> None:
        """Let a router send requests here; an encoder gets none from routers.

        Raises:
            ControlError: the router refuses it.
        """
        if self.shape.worker_type == "encoder":
            return
        self._router_url = f"http://{router_ip}:{router_port}"
        worker: dict[str, Any] = {"url": self.get_url(), "worker_type": self.shape.worker_type}
        if self.shape.worker_type == "prefill":
            worker["bootstrap_port"] = self._bootstrap_port
        register_worker(self._router_url, worker)

    def shutdown(self) -> None:
        """Take the server out of the router and end it. Nothing happens when it is gone already."""
        if self._router_url is not None and self._server is not None:
            deregister_worker(self._router_url, self._server.url)
            self._router_url = None
        if self._server is not None:
            self._server.stop()
        self._release_ports()

    def simulate_crash(self) -> None:
        """Kill the server without telling the router."""
        self._started_server().crash()

    def watch(self) -> None:
        """Return when the server has been shut down; it keeps one of the actor's threads until then.

        Raises:
            ServerDied: the server ended by itself.
        """
        self._started_server().watch()

    def get_url(self) -> str | None:
        """The server's URL; None where this node serves no HTTP."""
        return self._started_server().url if self.shape.node_rank == 0 else None

    def get_log_path(self) -> str:
        """The file that the server's output goes to."""
        return str(self._started_server().log_path)

    # -- health and generation ----------------------------------------------------------------------------------------

    def health_generate(self, timeout: float = 5.0) -> bool:
        """True when the server generates within `timeout` seconds.

        Raises:
            ControlError: it does not.
        """
        self._request("GET", "/health_generate", timeout=timeout)
        return True

    def get_server_info(self, timeout: float = CONTROL_SECONDS) -> Any:
        """The server's settings and its schedulers' state: a server that hangs does not answer.

        Raises:
            ControlError: no answer within `timeout` seconds.
        """
        return self._request("GET", "/server_info", timeout=timeout)

    def pause_generation(self, mode: str = "abort") -> Any:
        """Stop generating; running requests end as aborted (mode abort) or stay (retract, in_place)."""
        return self._request("POST", "/pause_generation", {"mode": mode})

    def continue_generation(self) -> Any:
        return self._request("POST", "/continue_generation", {})

    def flush_cache(self, timeout: float = CONTROL_SECONDS) -> None:
        """Empty the KV cache once no request runs.

        Raises:
            TimeoutError: requests still run after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while True:
            try:
                self._request("GET", "/flush_cache")
                return
            except ControlError as error:
                if error.status != 400:  # 400: requests run or wait
                    raise
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the cache was not flushed within {timeout:.0f} s: {error}") from error
            time.sleep(_POLL_SECONDS)

    def abort_all(self) -> Any:
        """Abort every request."""
        return self._request("POST", "/abort_request", {"abort_all": True})

    def start_profile(self, output_dir: str | None = None, **options: Any) -> Any:
        """Start SGLang's profiler; `options` as in its POST /start_profile."""
        return self._request("POST", "/start_profile", {"output_dir": output_dir, **options})

    def stop_profile(self) -> Any:
        return self._request("POST", "/stop_profile", {}, timeout=TRANSFER_SECONDS)

    # -- memory -------------------------------------------------------------------------------------------------------

    def release_memory_occupation(self) -> Any:
        """Free the memory of weights, KV cache and graphs, where SGLang's memory saver runs; says once where not.

        Nothing happens when all of it is free already: SGLang's scheduler does not survive a second release.
        """
        if self._asleep == set(MEMORY_TAGS):
            return None
        self.flush_cache()
        if not self._told_release_frees_nothing and not self._has_memory_saver():
            self._told_release_frees_nothing = True
            logger.info(
                "SGLang's memory saver does not run on this device: engine %d keeps weights and KV cache in memory "
                "while offloaded",
                self.rank,
            )
        answer = self._request("POST", "/release_memory_occupation", {})
        self._asleep = set(MEMORY_TAGS)
        return answer

    def resume_memory_occupation(self, tags: Sequence[str] | None = None) -> Any:
        """Take back what is free of the memory of weights, kv_cache and cuda_graph (default: of all three)."""
        wanted = [tag for tag in (MEMORY_TAGS if tags is None else tags) if tag in self._asleep]
        if not wanted:
            return None
        answer = self._request("POST", "/resume_memory_occupation", {"tags": wanted})
        self._asleep -= set(wanted)
        return answer

    def _has_memory_saver(self) -> bool:
        info = self.get_server_info()
        return info is None or bool(info["enable_memory_saver"])

    # -----------------------------------------------------------------------------------------------------------------

    def _started_server(self) -> ServerProcess:
        if self._server is None:
            raise RuntimeError(f"engine {self.rank} has no server yet: call init first")
        return self._server

    def _request(self, method: str, path: str, payload: Any = None, *, timeout: float = CONTROL_SECONDS) -> Any:
        if self.shape.node_rank:
            return None
        return self._started_server().request(method, path, payload, timeout=timeout)

    def _release_ports(self) -> None:
        for held in self._held:
            held.release()
        self._held = []
