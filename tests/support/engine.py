"""One real SGLang server on the tiny model, started by slime's own engine code and shared by all tests."""

from __future__ import annotations

import threading
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.backends.sglang_utils.control_client import ControlClient
from slime.backends.sglang_utils.server_args import EngineAddress, EngineShape, compute_layers
from slime.backends.sglang_utils.server_process import ServerProcess
from slime.utils import accelerator
from slime.utils.misc import get_free_port
from tests.support.tiny_model import TinyModel

START_TIMEOUT_S = 400.0


@dataclass(frozen=True)
class SGLangServer:
    """What a test needs of the shared server. A test that changes its weights must put the tiny model's back."""

    url: str
    model_dir: Path
    log_path: Path
    client: ControlClient


class SharedEngine:
    """Starts the server once, in the background when asked early, and stops it at the end of the run."""

    def __init__(self, model: TinyModel, log_dir: Path) -> None:
        self._model = model
        self._log_path = log_dir / "sglang.log"
        self._lock = threading.Lock()
        self._process: ServerProcess | None = None
        self._starter: threading.Thread | None = None

    def start_early(self) -> None:
        """Begin to start; returns at once. What goes wrong shows when the server is asked for."""
        self._starter = threading.Thread(target=self._try_start, name="sglang-starter", daemon=True)
        self._starter.start()

    def ready(self) -> SGLangServer:
        """The running server; waits for it."""
        if self._starter is not None:
            self._starter.join()
        process = self._start()
        process.wait_ready(START_TIMEOUT_S)
        return SGLangServer(process.url, self._model.path(), process.log_path, process.client)

    def stop(self) -> None:
        if self._starter is not None:
            self._starter.join()
        if self._process is not None:
            self._process.stop()

    def _try_start(self) -> None:
        try:
            self._start()
        except Exception:
            return  # ready() tries again and reports

    def _start(self) -> ServerProcess:
        with self._lock:
            if self._process is None:
                self._process = start_server(self._model.path(), self._log_path)
            return self._process


def start_server(model_dir: Path, log_path: Path, num_gpus: int = 1, **settings: Any) -> ServerProcess:
    """Start a server on `num_gpus` tensor-parallel ranks without waiting for it; `stop` it.

    Args:
        settings: `ServerArgs` fields.
    """
    device = accelerator.current()
    flags = {f"sglang_{name}": value for name, value in settings.items()}
    args = Namespace(hf_checkpoint=str(model_dir), seed=1, offload_rollout=False, **flags)
    address = EngineAddress("127.0.0.1", get_free_port(), get_free_port())
    layers = compute_layers(args, 0, EngineShape(num_gpus=num_gpus), address, device.engine_server_args())
    return ServerProcess(layers, device.engine_env(), log_path)
