"""The methods of an engine's actor that concern weights (sglang 0.5.23)."""

from __future__ import annotations

import abc
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from slime.backends.sglang_utils.control_client import CONTROL_SECONDS, ControlError
from slime.backends.sglang_utils.server_args import EngineShape
from slime.backends.sglang_utils.weight_check import WeightCheck
from slime.ray.utils import get_all
from slime.utils.checkpoint_folder import WeightsId, tensor_places, version_folder

if TYPE_CHECKING:
    from slime.backends.sglang_utils.local_checkpoint import LocalCheckpoint


class EngineWeights(abc.ABC):
    """What `SGLangEngine` does with weights: updates by every route, their version, and checks of what is loaded."""

    args: Namespace
    shape: EngineShape

    def set_up_weights(self) -> None:
        """Call it once `args` is set."""
        self._transfer_seconds: float = self.args.update_weight_timeout
        self._weight_check: WeightCheck | None = None
        self._other_nodes: list[Any] = []

    @abc.abstractmethod
    def _request(self, method: str, path: str, payload: Any = None, *, timeout: float = CONTROL_SECONDS) -> Any:
        """The server's answer; None on nodes that serve no HTTP."""

    def begin_weight_update(self) -> Any:
        """Open an update; SGLang refuses weights outside of one. One that has failed is closed before."""
        try:
            return self._request("POST", "/begin_weight_update", {})
        except ControlError as error:
            if error.status != 400 or "already open" not in str(error):
                raise
        self.end_weight_update()
        return self._request("POST", "/begin_weight_update", {})

    def end_weight_update(self) -> Any:
        """Close the update: what SGLang derives from weights is computed anew."""
        return self._request("POST", "/end_weight_update", {}, timeout=self._transfer_seconds)

    def update_weights_from_tensor(
        self,
        serialized_named_tensors: Sequence[str],
        load_format: str | None = None,
        flush_cache: bool = False,
        weight_version: str | None = None,
    ) -> Any:
        """Load tensors; one payload per tensor-parallel rank (see `update_weight.tensor_payload`)."""
        payload = {
            "serialized_named_tensors": list(serialized_named_tensors),
            "load_format": load_format,
            "flush_cache": flush_cache,
            "weight_version": weight_version,
        }
        return self._request("POST", "/update_weights_from_tensor", payload, timeout=self._transfer_seconds)

    def pull_weights(self, target_version: int) -> None:
        """Bring the weight update of that version to the engine's hosts; the server does not see it yet.

        It goes from `args.update_weight_disk_dir` to `args.update_weight_local_checkpoint_dir`, or stays where it is
        and is found whole. SGLang ends when it is told to load files that are not.

        Raises:
            DamagedCheckpoint, WrongBase, WrongChecksum: naming the file or the tensor.
            OSError: the disk is full.
        """
        refs = [engine.pull_weights.remote(target_version) for engine in self._other_nodes]
        source = version_folder(self.args.update_weight_disk_dir, target_version)
        if self.args.update_weight_local_checkpoint_dir is None:
            tensor_places(source)
        else:
            self._local_checkpoint().pull(source)
        self._await_nodes(refs, "pulling weights to the engine's other hosts")

    def get_pulled_weights(self) -> WeightsId | None:
        """Which weights `args.update_weight_local_checkpoint_dir` holds on all of the engine's hosts; None: no whole
        ones, or not the same."""
        refs = [engine.get_pulled_weights.remote() for engine in self._other_nodes]
        own = self._local_checkpoint().held()
        others = self._await_nodes(refs, "asking which weights the engine's other hosts hold")
        return own if all(held == own for held in others) else None

    def set_other_nodes(self, engines: Sequence[Any]) -> None:
        """The actors on the engine's other nodes, which pull weights when this one is told to."""
        self._other_nodes = list(engines)

    def _await_nodes(self, refs: list[Any], what: str) -> list[Any]:
        return get_all(refs, timeout=self._transfer_seconds, what=what) if refs else []

    def _local_checkpoint(self) -> LocalCheckpoint:
        from slime.backends.sglang_utils.local_checkpoint import LocalCheckpoint

        return LocalCheckpoint(self.args.update_weight_local_checkpoint_dir)

    def update_weights_from_disk(
        self,
        model_path: str,
        load_format: str | None = None,
        weight_version: str | None = None,
        flush_cache: bool = True,
    ) -> Any:
        """Load the Hugging Face checkpoint in `model_path`."""
        payload = {
            "model_path": model_path,
            "load_format": load_format,
            "weight_version": weight_version,
            "flush_cache": flush_cache,
        }
        return self._request("POST", "/update_weights_from_disk", payload, timeout=self._transfer_seconds)

    def init_weights_update_group(
        self, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> Any:
        """Join a process group over which weights are broadcast."""
        payload = {
            "master_address": master_address,
            "master_port": master_port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": group_name,
            "backend": backend,
        }
        return self._request("POST", "/init_weights_update_group", payload, timeout=self._transfer_seconds)

    def destroy_weights_update_group(self, group_name: str) -> Any:
        return self._request("POST", "/destroy_weights_update_group", {"group_name": group_name})

    def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        flush_cache: bool = False,
        weight_version: str | None = None,
        load_format: str | None = None,
    ) -> Any:
        """Receive a broadcast of these tensors."""
        payload = {
            "names": list(names),
            "dtypes": [str(dtype).removeprefix("torch.") for dtype in dtypes],
            "shapes": [list(shape) for shape in shapes],
            "group_name": group_name,
            "flush_cache": flush_cache,
            "weight_version": weight_version,
            "load_format": load_format,
        }
        return self._request("POST", "/update_weights_from_distributed", payload, timeout=self._transfer_seconds)

    def set_weight_version(self, weight_version: str) -> Any:
        """Name the weights that are loaded now; answers carry the name."""
        payload = {"new_version": weight_version, "abort_all_requests": False}
        return self._request("POST", "/update_weight_version", payload)

    def get_weight_version(self) -> str | None:
        """The name of the weights that are loaded."""
        info = self._request("GET", "/model_info")
        return None if info is None else info["weight_version"]

    def check_weights(self, action: str) -> Any:
        """SGLang's `snapshot`, `checksum` or `reset_tensors` (random values), or `compare` (see `WeightCheck`)."""
        return None if self.shape.node_rank else self._checker().run(action)

    def verify_weights(self, checkpoint: str) -> Any:
        """Check the loaded weights against a checkpoint on disk, bit for bit (see `WeightCheck.verify`)."""
        return None if self.shape.node_rank else self._checker().verify(checkpoint)

    def _checker(self) -> WeightCheck:
        if self._weight_check is None:
            self._weight_check = WeightCheck(self._request)
        return self._weight_check
