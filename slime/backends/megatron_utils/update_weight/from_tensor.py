"""Weights for colocated engines: each trainer hands its bucket over in shared memory (CUDA IPC on GPUs)."""

from __future__ import annotations

import logging
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime.backends.megatron_utils.update_weight import verify
from slime.backends.megatron_utils.update_weight.base import WeightsGetter, WeightUpdater
from slime.backends.megatron_utils.update_weight.tensor_payload import LOAD_FORMAT, TensorPayload
from slime.ray.utils import get_all
from slime.utils import accelerator
from slime.utils.distributed_utils import get_gloo_group
from slime.utils.reloadable_process_group import new_permanent_group

logger = logging.getLogger(__name__)

ENGINE_SECONDS = 660.0  # longer than an engine waits for its server, so that the engine's error comes first


class UpdateWeightFromTensor(WeightUpdater):
    """The trainers on an engine's devices form a gloo group; its first rank sends one payload per device.

    pause -> flush -> begin -> a bucket after the other -> end -> name the version -> continue. The version is named
    last: weights that are only partly there never bear the new one.
    """

    def __init__(self, args: Namespace, model: Sequence[torch.nn.Module], weights_getter: WeightsGetter) -> None:
        super().__init__(args, model, weights_getter)
        self._engines: Sequence[Any] = ()
        self._own_engine: Any = None
        self._own_group: dist.ProcessGroup | None = None
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._verified = False

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
        self._own_engine = self._own_group = None
        for index, ranks in enumerate(engine_ranks(counts, offsets, dist.get_world_size())):
            if ranks not in self._groups:
                self._groups[ranks] = new_permanent_group(ranks=list(ranks), backend="gloo")
            if dist.get_rank() in ranks:
                self._own_engine, self._own_group = rollout_engines[index], self._groups[ranks]

    def disconnect_rollout_engines(self) -> None:
        self._engines, self._own_engine = (), None

    @torch.no_grad()
    def update_weights(self) -> None:
        started = time.monotonic()
        self.weight_version += 1
        weights = self._weights_getter()
        self._tell_engines("pause_generation", "flush_cache", "begin_weight_update")
        sent = sum(self._send(chunk) for chunk in self._iterator.chunks(weights))
        self._tell_engines("end_weight_update")
        self._on_first_rank(lambda: self._call_all("set_weight_version", str(self.weight_version)))
        if self.args.check_weight_update_equal and not self._verified:
            verify.verify_engines(self.args, self._iterator.chunks(weights), self._engines, self.weight_version)
            self._verified = True
        self._tell_engines("continue_generation")
        if dist.get_rank() == 0:
            seconds = time.monotonic() - started
            logger.info("weights %d: %.1f MB to the engines in %.2f s", self.weight_version, sent / 1e6, seconds)

    def _send(self, chunk: Sequence[tuple[str, Tensor]]) -> int:
        """Hand one bucket to this rank's engine; its bytes. A rank without an engine only took part in gathering."""
        size = sum(tensor.numel() * tensor.element_size() for _, tensor in chunk)
        if self._own_group is None:
            return size
        payload = TensorPayload(chunk)
        is_first = dist.get_rank(self._own_group) == 0
        texts: list[str] | None = [""] * dist.get_world_size(self._own_group) if is_first else None
        dist.gather_object(payload.text, texts, group=self._own_group, group_dst=0)
        if is_first:
            ref = self._own_engine.update_weights_from_tensor.remote(texts, load_format=LOAD_FORMAT)
            get_all([ref], timeout=ENGINE_SECONDS, what="sending weights to an engine")
        dist.barrier(self._own_group)  # the payload's memory must stay until the engine has read it
        del payload
        accelerator.current().ipc_collect()
        return size

    def _tell_engines(self, *methods: str) -> None:
        """Call methods of all engines, one after the other; no rank goes on before all are done."""

        def call() -> None:
            for method in methods:
                self._call_all(method)

        self._on_first_rank(call)

    def _call_all(self, method: str, *method_args: Any) -> None:
        refs = [getattr(engine, method).remote(*method_args) for engine in self._engines]
        get_all(refs, timeout=ENGINE_SECONDS, what=f"{method} of the engines")

    @staticmethod
    def _on_first_rank(action: Callable[[], Any]) -> None:
        if dist.get_rank() == 0:
            action()
        dist.barrier(get_gloo_group())


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
