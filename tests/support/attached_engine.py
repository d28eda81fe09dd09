"""An engine actor for a server that runs already, with faults to order."""

from __future__ import annotations

import time
from argparse import Namespace
from typing import Any

from slime.backends.sglang_utils.control_client import ControlClient
from slime.backends.sglang_utils.server_args import EngineShape
from slime.backends.sglang_utils.sglang_engine import SGLangEngine

TRANSFER_SECONDS = 120.0


class AttachedEngine(SGLangEngine):
    """Speaks to the server at `url`; it neither starts nor ends it."""

    def __init__(self, url: str, num_gpus: int = 1) -> None:
        self.args = Namespace()
        self.rank = 0
        self._transfer_seconds = TRANSFER_SECONDS
        self.shape = EngineShape(num_gpus=num_gpus)
        self._client = ControlClient(url)
        self._weight_check = None
        self._other_nodes = []
        self._fault: str | None = None

    def use_folders(self, shared: str, local: str | None) -> None:
        """Where updates by disk are."""
        self.args = Namespace(update_weight_disk_dir=shared, update_weight_local_checkpoint_dir=local)

    def fail_next_bucket(self, fault: str) -> None:
        """`refuse`: the server will refuse the next bucket; `hang`: it will not hear of it for some seconds."""
        self._fault = fault

    def update_weights_from_distributed(self, *args: Any, **kwargs: Any) -> Any:
        self._have_fault()
        return super().update_weights_from_distributed(*args, **kwargs)

    def update_weights_from_tensor(self, *args: Any, **kwargs: Any) -> Any:
        self._have_fault()
        return super().update_weights_from_tensor(*args, **kwargs)

    def _have_fault(self) -> None:
        fault, self._fault = self._fault, None
        if fault == "refuse":
            self._request("POST", "/end_weight_update", {})  # outside of an update it takes no weights
        if fault == "hang":
            time.sleep(8.0)

    def _request(self, method: str, path: str, payload: Any = None, *, timeout: float = 60.0) -> Any:
        return self._client.request(method, path, payload, timeout=timeout)
