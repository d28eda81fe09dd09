"""An engine actor in this process whose server is a dictionary: what it would have loaded from a folder."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from slime.backends.megatron_utils.hf_to_megatron.reader import SafetensorReader
from slime.backends.sglang_utils.server_args import EngineShape
from slime.backends.sglang_utils.sglang_engine import SGLangEngine


class FolderEngine(SGLangEngine):
    """Its own code brings weights to the host; only requests to the server end here.

    Attributes:
        weights: what the server has loaded.
        calls: the paths of the requests, in order.
    """

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self.rank = 0
        self._transfer_seconds = 60.0
        self.shape = EngineShape(num_gpus=1)
        self._other_nodes = []
        self.weights: dict[str, torch.Tensor] = {}
        self.version: str | None = None
        self.calls: list[str] = []

    def _request(self, method: str, path: str, payload: Any = None, *, timeout: float = 60.0) -> Any:
        self.calls.append(path)
        if path == "/update_weights_from_disk":
            assert payload["flush_cache"] is False
            assert (Path(payload["model_path"]) / "config.json").exists()
            reader = SafetensorReader(payload["model_path"])
            self.weights = {name: reader.get_tensor(name).clone() for name in reader.names}
        if path == "/update_weight_version":
            self.version = payload["new_version"]


class Handle:
    """Calls a method at once, as if it were a Ray actor's: `handle.method.remote(...)`; see `results_of`."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        return _Method(getattr(self._target, name))


class _Method:
    def __init__(self, method: Callable[..., Any]) -> None:
        self.remote = method


def results_of(refs: list[Any], **_: Any) -> list[Any]:
    """In place of `get_all`."""
    return refs
