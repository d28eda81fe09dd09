"""Weights for engines on devices of their own: each pipeline stage broadcasts its weights to all engines."""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from slime.backends.megatron_utils.update_weight.base import WeightsGetter, WeightUpdater
from slime.backends.megatron_utils.update_weight.broadcast_group import BroadcastGroup
from slime.backends.megatron_utils.update_weight.engine_calls import together
from slime.backends.megatron_utils.update_weight.hf_weight_iterator import HfWeightIterator


class UpdateWeightFromDistributed(WeightUpdater):
    """The first tensor- and data-parallel rank of each stage forms a group with all engines and sends what its stage
    holds, bucket by bucket: while one is on the wire, the next is gathered (experts over expert-parallel ranks) and
    converted.

    The groups last from update to update, but not while trainers sleep or after engines have changed.
    """

    def __init__(self, args: Namespace, model: Sequence[torch.nn.Module], weights_getter: WeightsGetter) -> None:
        super().__init__(args, model, weights_getter)
        self._stage_iterator = HfWeightIterator(args, model, own_stage_only=True)
        self._ranks_of_each: list[int] = []
        self._lock: Any = None
        self._group: BroadcastGroup | None = None
        self._error: Exception | None = None

    def connect_rollout_engines(
        self,
        rollout_engines: Sequence[Any],
        rollout_engine_lock: Any,
        engine_gpu_counts: Sequence[int] | None = None,
        engine_gpu_offsets: Sequence[int] | None = None,
        engine_parallel_configs: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """See the base class; the groups are made at the next update.

        Raises:
            ValueError: an engine is pipeline-parallel: in SGLang, its stages would join under the same ranks.
        """
        self._leave()
        for index, config in enumerate(engine_parallel_configs or ()):
            if config["pp_size"] > 1:
                raise ValueError(
                    f"engine {index} has --sglang-pp-size {config['pp_size']}: weights can be broadcast to "
                    "tensor-parallel engines only"
                )
        self._engines = rollout_engines
        self._verified = False
        self._lock = rollout_engine_lock
        self._ranks_of_each = list(engine_gpu_counts or [self.args.rollout_num_gpus_per_engine] * len(rollout_engines))

    def disconnect_rollout_engines(self) -> None:
        self._leave()
        super().disconnect_rollout_engines()

    def _transfer(self, weights: Mapping[str, Tensor]) -> None:
        together(self._join)
        self._call_engines("begin_weight_update")
        together(lambda: self._send(weights))
        self._call_engines("end_weight_update")
        if self.args.offload_train:
            self._leave()

    def _send(self, weights: Mapping[str, Tensor]) -> None:
        """Gather all of the stage's buckets, and send them where this rank is its stage's sender.

        After an error the gathering goes on, since other ranks take part in it.
        """
        self._error = None
        for chunk in self._stage_iterator.chunks(weights):
            self._attempt(functools.partial(BroadcastGroup.send, tensors=chunk))
        self._attempt(BroadcastGroup.finish)
        if self._error is not None:
            raise self._error

    def _attempt(self, step: Callable[[BroadcastGroup], None]) -> None:
        """Take a step of sending. After an error, which is kept, there is no group any more."""
        if self._group is None:
            return
        try:
            step(self._group)
        except Exception as error:
            self._error = error
            self._leave()

    def _join(self) -> None:
        """Form the group, where this rank is a sender and has none."""
        from megatron.core import parallel_state as mpu

        replica = mpu.get_data_parallel_rank(with_context_parallel=True)
        if self._group is None and replica == mpu.get_tensor_model_parallel_rank() == 0:
            name = f"slime-pp_{mpu.get_pipeline_model_parallel_rank()}"
            seconds = self.args.update_weight_timeout
            self._group = BroadcastGroup(name, self._engines, self._ranks_of_each, self._lock, seconds)

    def _leave(self) -> None:
        if self._group is not None:
            self._group.leave()
            self._group = None
