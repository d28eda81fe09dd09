"""How trained weights reach the engines: the seam, and the choice of an implementation."""

from __future__ import annotations

import abc
import logging
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime.backends.megatron_utils.update_weight import verify
from slime.backends.megatron_utils.update_weight.engine_calls import (
    call_all,
    call_engines,
    engine_seconds,
    on_first_rank,
)
from slime.backends.megatron_utils.update_weight.hf_weight_iterator import HfWeightIterator

logger = logging.getLogger(__name__)

WeightsGetter = Callable[[], Mapping[str, Tensor]]


class WeightUpdater(abc.ABC):
    """Sends the trainer's weights to the engines. Every rank has one, and every rank calls every method.

    An update is: prepare -> pause -> flush -> transfer -> name the version -> continue. The version is named last:
    weights that are only partly there never bear the new one. A transport says how to prepare and to transfer. When it
    can't prepare, the engines go on with the weights that they have.

    Args:
        model: this rank's model chunks.
        weights_getter: this rank's weights by global name, such as the trainer's backup; called at each update.

    Attributes:
        weight_version: updates so far; samples carry the number of the update that made their weights.
    """

    def __init__(self, args: Namespace, model: Sequence[torch.nn.Module], weights_getter: WeightsGetter) -> None:
        self.args = args
        self.weight_version = 0
        self._weights_getter = weights_getter
        self._iterator = HfWeightIterator(args, model)
        self._metrics: dict[str, float] = {}
        self._engines: Sequence[Any] = ()
        self._verified = False

    @abc.abstractmethod
    def connect_rollout_engines(
        self,
        rollout_engines: Sequence[Any],
        rollout_engine_lock: Any,
        engine_gpu_counts: Sequence[int] | None = None,
        engine_gpu_offsets: Sequence[int] | None = None,
        engine_parallel_configs: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Use these engines from now on (actor handles, devices of each, first device of each)."""

    def disconnect_rollout_engines(self) -> None:
        """Forget the engines."""
        self._engines = ()

    @torch.no_grad()
    def update_weights(self) -> None:
        """Send all weights; when it returns, every engine generates with them and names their version.

        Requests that run meanwhile are treated as --pause-generation-mode says.

        Raises:
            WeightUpdateError: on every rank. Engines that were paused stay so until an update succeeds: none goes on
                with mixed weights.
        """
        started = time.monotonic()
        self.weight_version += 1
        weights = self._weights_getter()
        self._prepare(weights)
        self._pause_engines()
        self._transfer(weights)
        on_first_rank(lambda: self._call_all("set_weight_version", str(self.weight_version)))
        if self.args.check_weight_update_equal and not self._verified:
            verify.verify_engines(self.args, self._iterator.chunks(weights), self._engines, self.weight_version)
            self._verified = True
        self._call_engines("continue_generation")
        self._conclude()
        if dist.get_rank() == 0:
            size, seconds = self._iterator.total_bytes / 1e6, time.monotonic() - started
            logger.info("weights %d: %.1f MB to the engines in %.2f s", self.weight_version, size, seconds)

    def _prepare(self, weights: Mapping[str, Tensor]) -> None:
        """What can be done while engines still generate."""
        return

    @abc.abstractmethod
    def _transfer(self, weights: Mapping[str, Tensor]) -> None:
        """Load the weights into the paused engines."""

    def _conclude(self) -> None:
        """What can be done once engines generate again."""
        return

    def _pause_engines(self) -> None:
        """Stop generation, and drop the KV cache that the old weights made (unless running requests keep theirs)."""
        mode = self.args.pause_generation_mode

        def pause() -> None:
            self._call_all("pause_generation", mode)
            if mode != "in_place":
                self._call_all("flush_cache")

        on_first_rank(pause)

    def _call_engines(self, *methods: str) -> None:
        call_engines(self._engines, *methods, seconds=engine_seconds(self.args))

    def _call_all(self, method: str, *method_args: Any) -> None:
        call_all(self._engines, method, *method_args, seconds=engine_seconds(self.args))

    def pop_metrics(self) -> dict[str, float]:
        """Figures of the last update, for the log; empty on ranks that have none."""
        metrics, self._metrics = self._metrics, {}
        return metrics


def create_updater(args: Namespace, model: Sequence[torch.nn.Module], weights_getter: WeightsGetter) -> WeightUpdater:
    """The updater for the run's transport."""
    return _updater_class(args)(args, model, weights_getter)


def _updater_class(args: Namespace) -> type[WeightUpdater]:
    if args.update_weight_mode == "delta":
        from slime.backends.megatron_utils.update_weight.from_disk_delta import UpdateWeightFromDiskDelta

        return UpdateWeightFromDiskDelta
    if args.update_weight_transport == "disk":
        from slime.backends.megatron_utils.update_weight.from_disk import UpdateWeightFromDisk

        return UpdateWeightFromDisk
    if args.colocate:
        from slime.backends.megatron_utils.update_weight.from_tensor import UpdateWeightFromTensor

        return UpdateWeightFromTensor
    from slime.backends.megatron_utils.update_weight.from_distributed import UpdateWeightFromDistributed

    return UpdateWeightFromDistributed
