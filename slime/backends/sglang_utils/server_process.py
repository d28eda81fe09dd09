"""One SGLang server: its process, its log, and waiting until it answers."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slime.backends.sglang_utils.control_client import ControlClient, ControlError
from slime.backends.sglang_utils.server_args import ServerArgsLayers
from slime.ray.guard import GuardedProcess, spawn_guarded, tail
from slime.ray.ports import host_port

_POLL_SECONDS = 0.2
_PROBE_SECONDS = 30.0
_LOG_LINES = 40
# PyTorch's allocator settings of a trainer; torch_memory_saver in the server doesn't bear them.
_DROPPED_ENV = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_DEFAULT_ENV = {
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",  # /health is asked often; /health_generate generates
    "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "false",
    "SGLANG_JIT_DEEPGEMM_FAST_WARMUP": "true",
    "SGLANG_MEMORY_SAVER_CUDA_GRAPH": "true",
    "SGLANG_BATCH_INVARIANT_OPS_ENABLE_MM_FALLBACK_VARIANT": "true",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "false",
    "SGLANG_DISABLE_TP_MEMORY_INBALANCE_CHECK": "true",
}


class ServerStartError(RuntimeError):
    """A server ended before it was ready, or was not ready in time."""


class ServerDied(RuntimeError):
    """A server ended that nobody has stopped."""


class ServerProcess:
    """A running server, which ends with the process that holds this object.

    Args:
        layers: its settings.
        device_env: environment that the device needs.
        log_path: its output; the settings lie beside it as JSON.
    """

    def __init__(self, layers: ServerArgsLayers, device_env: Mapping[str, str], log_path: Path) -> None:
        self.log_path = log_path
        self._stopped = False
        host, port = layers.owned["host"], layers.owned["port"]
        self.url = f"http://{host_port(host, port)}"
        log_path.parent.mkdir(parents=True, exist_ok=True)
        settings = log_path.with_suffix(".json")
        settings.write_text(json.dumps(dataclasses.asdict(layers), indent=1))
        self._process: GuardedProcess = spawn_guarded(
            [sys.executable, "-m", "slime.backends.sglang_utils.launch", str(settings)],
            env=server_env(os.environ, device_env, host, layers.fixed["model_path"]),
            log_path=log_path,
            scratch=True,
        )
        self.client = ControlClient(self.url, layers.flags.get("api_key"))

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def where_to_look(self) -> str:
        """End of an error message: the log's path and last lines."""
        ended = "" if self.is_alive else f"; the server has ended with status {self._process.poll()}"
        lines = tail(self.log_path, _LOG_LINES)
        return f"{ended}\nlog of the server: {self.log_path}, last lines:\n{lines}"

    def request(self, method: str, path: str, payload: Any = None, *, timeout: float) -> Any:
        """The server's answer.

        Raises:
            ControlError: it refuses, or does not answer within `timeout` seconds; with the log's path and last lines.
        """
        try:
            return self.client.request(method, path, payload, timeout=timeout)
        except ControlError as error:
            error.args = (f"{error}{self.where_to_look()}",)
            raise

    def wait_ready(self, timeout: float) -> None:
        """Wait until the server generates.

        Raises:
            ServerStartError: it ended, or `timeout` seconds passed; with the log's path and last lines.
        """
        self.wait_until(lambda: self.client.answers("/health_generate", timeout=_PROBE_SECONDS), timeout)

    def wait_until(self, is_ready: Callable[[], bool], timeout: float) -> None:
        """Poll `is_ready`; errors as for `wait_ready`."""
        deadline = time.monotonic() + timeout
        while not is_ready():
            if not self.is_alive:
                raise ServerStartError(f"the SGLang server at {self.url} ended while starting{self.where_to_look()}")
            if time.monotonic() > deadline:
                raise ServerStartError(
                    f"the SGLang server at {self.url} is not ready after {timeout:.0f} s "
                    f"(--engine-start-timeout){self.where_to_look()}"
                )
            time.sleep(_POLL_SECONDS)

    def watch(self) -> None:
        """Wait until the server is stopped.

        Raises:
            ServerDied: it ended by itself; with the log's path and last lines.
        """
        self._process.wait()
        if not self._stopped:
            raise ServerDied(f"the SGLang server at {self.url} has died{self.where_to_look()}")

    def stop(self) -> None:
        """End the server and everything below it at once: it has nothing to save, its own way out takes seconds."""
        self._stopped = True
        self._process.terminate()

    def crash(self) -> None:
        """End the server as if it had died by itself."""
        self._process.terminate()


def server_env(base: Mapping[str, str], device_env: Mapping[str, str], host: str, model_path: str) -> dict[str, str]:
    """Environment of a server: the caller's, what SGLang needs unless it is set, and what the device needs."""
    env = {**_DEFAULT_ENV, **{name: value for name, value in base.items() if name not in _DROPPED_ENV}, **device_env}
    if os.path.isdir(model_path):
        env.setdefault("HF_HUB_OFFLINE", "1")
    inside = f"localhost,127.0.0.1,::1,{host}"
    for name in ("NO_PROXY", "no_proxy"):  # the server calls itself
        env[name] = ",".join(filter(None, [env.get(name), inside]))
    return env
