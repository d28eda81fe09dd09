"""How trained weights reach the engines: the seam, and the choice of an implementation."""

from __future__ import annotations

import abc
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from slime.backends.megatron_utils.update_weight.hf_weight_iterator import HfWeightIterator

WeightsGetter = Callable[[], Mapping[str, Tensor]]


class WeightUpdater(abc.ABC):
    """Sends the trainer's weights to the engines. Every rank has one, and every rank calls every method.

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

    @abc.abstractmethod
    def update_weights(self) -> None:
        """Send all weights; when it returns, every engine generates with them and names their version.

        Raises:
            An engine's error, also when a later call would repair it: no engine goes on with mixed weights.
        """

    def disconnect_rollout_engines(self) -> None:
        """Forget the engines."""
        return

    def pop_metrics(self) -> dict[str, float]:
        """Figures of the last update, for the log; empty on ranks that have none."""
        metrics, self._metrics = self._metrics, {}
        return metrics


def create_updater(args: Namespace, model: Sequence[torch.nn.Module], weights_getter: WeightsGetter) -> WeightUpdater:
    """The updater for the run's transport.

    Raises:
        NotImplementedError: trainers and engines on different devices.
    """
    if args.colocate and args.update_weight_transport == "nccl" and args.update_weight_mode == "full":
        from slime.backends.megatron_utils.update_weight.from_tensor import UpdateWeightFromTensor

        return UpdateWeightFromTensor(args, model, weights_getter)
    raise NotImplementedError(
        "weights can be sent to colocated engines only so far: give --colocate "
        f"(--update-weight-transport {args.update_weight_transport}, --update-weight-mode {args.update_weight_mode})"
    )
