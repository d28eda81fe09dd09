"""The Ray actor that speaks to an SGLang server which others run (sglang 0.5.23)."""

from __future__ import annotations

import logging
import threading
import time
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from slime.backends.sglang_utils.control_client import CONTROL_SECONDS, ControlClient, ControlError
from slime.backends.sglang_utils.external import ExternalEngineInfo
from slime.backends.sglang_utils.server_args import EngineShape
from slime.backends.sglang_utils.server_process import ServerDied, ServerStartError
from slime.backends.sglang_utils.sglang_engine import SGLangEngine
from slime.ray.router import deregister_worker

logger = logging.getLogger(__name__)

WATCH_SECONDS = 1.0  # between looks at whether something listens there
REFUSALS = 3  # in a row, and the server counts as dead


class ExternalEngine(SGLangEngine):
    """Attached to a server: it neither starts nor ends it, and it never puts it to sleep.

    Args:
        rank: number of this actor among all engine actors.
        info: the server.
    """

    def __init__(self, args: Namespace, rank: int, info: ExternalEngineInfo) -> None:
        self._set_up(args, rank, EngineShape(num_gpus=info.num_gpus, worker_type=info.worker_type))
        self._info = info
        self._client = ControlClient(info.url, getattr(args, "sglang_api_key", None))
        self._bootstrap_port = info.bootstrap_port
        self._left = threading.Event()

    def attach(self, router_ip: str | None = None, router_port: int | None = None) -> None:
        """Wait until the server generates, and let the router send it requests if one is given.

        Raises:
            ServerStartError: it does not generate within args.engine_start_timeout.
            ControlError: the router refuses it.
        """
        deadline = time.monotonic() + self.args.engine_start_timeout
        while True:
            try:
                self.continue_generation()  # a run that was killed while it sent weights has left it paused
                self.health_generate(timeout=CONTROL_SECONDS)
                break
            except ControlError as error:
                if time.monotonic() > deadline:
                    raise ServerStartError(
                        f"the external server at {self._info.url} does not generate: {error}"
                    ) from error
                time.sleep(WATCH_SECONDS)
        logger.info("attached to the external server at %s", self._info.url)
        if router_ip is not None:
            self.register(router_ip, router_port)

    def get_url(self) -> str:
        return self._info.url

    def get_log_path(self) -> str:
        raise RuntimeError(f"the server at {self._info.url} was not started by this run: its log is elsewhere")

    def shutdown(self) -> None:
        """Take the server out of the router; it runs on."""
        self._left.set()
        if self._router_url is not None:
            deregister_worker(self._router_url, self._info.url)
            self._router_url = None

    def simulate_crash(self) -> None:
        raise RuntimeError(f"the server at {self._info.url} was not started by this run and is not ended by it")

    def watch(self) -> None:
        """Return when the run has left the server.

        Raises:
            ServerDied: nothing listens there any more.
        """
        refused = 0
        while not self._left.wait(WATCH_SECONDS):
            try:
                self._client.get("/health", timeout=CONTROL_SECONDS)
                refused = 0
            except ControlError as error:
                # a server that is busy may be late; one that is gone refuses the connection
                refused = refused + 1 if isinstance(error.__cause__, OSError) and _is_refusal(error.__cause__) else 0
                if refused >= REFUSALS:
                    raise ServerDied(f"the external server at {self._info.url} is gone: {error}") from None

    def release_memory_occupation(self) -> None:
        """Nothing: its memory is not this run's."""

    def resume_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Nothing: its memory is not this run's."""

    def _request(self, method: str, path: str, payload: Any = None, *, timeout: float = CONTROL_SECONDS) -> Any:
        return self._client.request(method, path, payload, timeout=timeout)


def _is_refusal(error: OSError) -> bool:
    return isinstance(getattr(error, "reason", error), ConnectionRefusedError)
