"""Weights for colocated engines: each trainer hands its bucket over in shared memory (CUDA IPC on GPUs)."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime.backends.megatron_utils.update_weight.base import WeightsGetter, WeightUpdater
from slime.backends.megatron_utils.update_weight.engine_calls import engine_seconds, together
from slime.backends.megatron_utils.update_weight.tensor_payload import (
    LOAD_FORMAT,
    SharedMemory,
    TensorPayload,
    parts,
)
from slime.ray.utils import get_all
from slime.utils import accelerator
from slime.utils.reloadable_process_group import new_permanent_group


class UpdateWeightFromTensor(WeightUpdater):
    """The trainers on an engine's devices form a gloo group; its first rank sends one payload per device."""

    def __init__(self, args: Namespace, model: Sequence[torch.nn.Module], weights_getter: WeightsGetter) -> None:
        super().__init__(args, model, weights_getter)
        self._own_engine: Any = None
        self._own_group: dist.ProcessGroup | None = None
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._on_way: tuple[TensorPayload, Any] | None = None
        self._error: Exception | None = None
        self._memories = [SharedMemory(), SharedMemory()]

    def connect_rollout_engines(
        self,
        rollout_engines: Sequence[Any],
        rollout_engine_lock: Any,
        engine_gpu_counts: Sequence[int] | None = None,
        engine_gpu_offsets: Sequence[int] | None = None,
        engine_parallel_configs: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """See the base class.

        Raises:
            ValueError: an engine has a device that no trainer shares.
        """
        counts = engine_gpu_counts or [self.args.rollout_num_gpus_per_engine] * len(rollout_engines)
        offsets = engine_gpu_offsets or [sum(counts[:index]) for index in range(len(counts))]
        self._engines = rollout_engines
        self._verified = False
        self._own_engine = self._own_group = None
        for index, ranks in enumerate(engine_ranks(counts, offsets, dist.get_world_size())):
            if ranks not in self._groups:
                self._groups[ranks] = new_permanent_group(ranks=list(ranks), backend="gloo")
            if dist.get_rank() in ranks:
                self._own_engine, self._own_group = rollout_engines[index], self._groups[ranks]

    def disconnect_rollout_engines(self) -> None:
        super().disconnect_rollout_engines()
        self._own_engine = None
        self._memories = [SharedMemory(), SharedMemory()]

    def _transfer(self, weights: Mapping[str, Tensor]) -> None:
        self._call_engines("begin_weight_update")
        together(lambda: self._send_all(weights))
        self._call_engines("end_weight_update")

    def _send_all(self, weights: Mapping[str, Tensor]) -> None:
        """Gather and send all buckets: while the engine loads one, the next is gathered and laid out.

        After an error the gathering goes on, since other ranks take part in it. A rank without an engine only gathers.
        """
        self._error, goes_on = None, self._own_group is not None
        for chunk in self._iterator.chunks(weights):
            for part in parts(chunk):
                if goes_on:
                    self._memories.reverse()
                    goes_on = self._send(TensorPayload(part, self._memories[0]))
        self._await_engine()
        if self._error is not None:
            raise self._error

    def _send(self, payload: TensorPayload) -> bool:
        """Hand one bucket to this rank's engine, if it has loaded the one before; whether it has."""
        is_first = dist.get_rank(self._own_group) == 0
        texts: list[str] | None = [""] * dist.get_world_size(self._own_group) if is_first else None
        dist.gather_object(payload.text, texts, group=self._own_group, group_dst=0)
        if not self._await_engine():
            return False
        send = self._own_engine.update_weights_from_tensor.remote
        self._on_way = payload, send(texts, load_format=LOAD_FORMAT) if is_first else None
        return True

    def _await_engine(self) -> bool:
        """Wait until the engine has loaded the bucket that is on its way; whether it could. Every rank waits, because
        a bucket's memory must stay until then; the first one keeps the error."""
        if self._on_way is None:
            return True
        (_, ref), self._on_way = self._on_way, None
        if ref is not None:
            try:
                get_all([ref], timeout=engine_seconds(self.args), what="sending weights to an engine")
            except Exception as error:
                self._error = error
        loaded = [self._error is None]
        dist.broadcast_object_list(loaded, group=self._own_group, group_src=0)
        accelerator.current().ipc_collect()
        return loaded[0]


def engine_ranks(counts: Sequence[int], offsets: Sequence[int], world_size: int) -> list[tuple[int, ...]]:
    """Trainer ranks on each engine's devices; trainers hold devices 0, 1, ... in rank order.

    Raises:
        ValueError: an engine has a device that no trainer shares.
    """
    ranks = [tuple(range(offset, offset + count)) for count, offset in zip(counts, offsets, strict=True)]
    for index, own in enumerate(ranks):
        if own[-1] >= world_size:
            raise ValueError(
                f"engine {index} is on devices {own[0]} to {own[-1]}, but trainers are on 0 to {world_size - 1} only: "
                "colocated engines must lie within the trainer's devices (--rollout-num-gpus)"
            )
    return ranks
