"""Routing replay: training passes use the experts of an earlier pass (R2) or of the engine (R3).

R2 (`--use-routing-replay`): the pass that computes the policy's log-probs records each layer's choice per token, and
the training passes replay it. R3 (`--use-rollout-routing-replay`): the engine's choices come with the samples, and
both passes replay them. The gate's probabilities are always those of the present weights; only which experts they
belong to is fixed. MTP layers choose for themselves: neither pass records them.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from slime.backends.megatron_utils.data import DataIterator, packed_padding
from slime.backends.megatron_utils.moe.layer_replay import LayerReplay, Mode, smallest_dtype
from slime.backends.megatron_utils.update_weight.common import unwrap_model

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel as DDP

OWN_CHOICE = -1


class RoutingReplay:
    """The replay of all MoE layers of a rank's model chunks.

    Raises:
        RuntimeError: a router of the model can't replay.
    """

    def __init__(self, args: Namespace, model: Sequence[DDP]) -> None:
        self.args = args
        self.from_engine: bool = args.use_rollout_routing_replay
        # per chunk: (number of the layer in the whole model, from 0; its replay)
        self._layers = {id(chunk): _layers_of(chunk) for chunk in model}

    @contextmanager
    def record(self) -> Iterator[None]:
        """Forward passes in this block record the routers' choices, in place of what was recorded before."""
        self.clear()
        with self._mode(Mode.RECORD):
            yield

    @contextmanager
    def replay(self, measure: bool = True) -> Iterator[None]:
        """Forward passes in this block, and recomputations in their backward passes, replay the choices.

        Args:
            measure: count them for `pop_metrics`.
        """
        for layer in self._all():
            layer.measures = measure
        with self._mode(Mode.REPLAY):
            yield
            for layer in self._all():
                layer.finish()

    @contextmanager
    def forward(self, chunk: DDP, micro_batch: int) -> Iterator[None]:
        """The forward pass of one chunk over one micro-batch, counted from the start of the rollout."""
        layers = self._layers[id(chunk)]
        for _, layer in layers:
            layer.micro_batch = micro_batch
        yield
        for _, layer in layers:
            layer.micro_batch = None

    def fill(self, iterators: Sequence[DataIterator]) -> None:
        """Take the choices of all micro-batches from the column `rollout_routed_experts`.

        Args:
            iterators: one per chunk; all have the same data.
        """
        self.clear()
        rollout_data = iterators[0].rollout_data
        for micro_batch, indices in enumerate(iterators[0].micro_batch_indices):
            experts = [rollout_data["rollout_routed_experts"][i] for i in indices]
            lengths = [len(rollout_data["tokens"][i]) for i in indices]
            rows = pack_experts(experts, lengths, self.args.data_pad_size_multiplier, self.args.sequence_parallel)
            rows = rows.to(smallest_dtype(self.args.num_experts))
            for layers in self._layers.values():
                for number, layer in layers:
                    layer.experts[micro_batch] = rows[:, number].contiguous()

    def clear(self) -> None:
        """Forget all choices."""
        for layer in self._all():
            layer.experts.clear()

    def pop_metrics(self, device: torch.device) -> dict[str, float]:
        """`routing_replay_changed`, the share of (token, layer) pairs whose choice was changed, of those measured
        since the last call.

        All ranks take part.
        """
        counts = torch.zeros(2, dtype=torch.float64, device=device)
        for layer in self._all():
            if layer.changed is not None:
                counts += layer.changed
                layer.changed = None
        dist.all_reduce(counts)
        changed, total = counts.tolist()
        return {"routing_replay_changed": changed / total if total else 0.0}

    @contextmanager
    def _mode(self, mode: Mode) -> Iterator[None]:
        for layer in self._all():
            layer.mode = mode
        yield
        for layer in self._all():
            layer.mode = Mode.OFF

    def _all(self) -> Iterator[LayerReplay]:
        return (layer for layers in self._layers.values() for _, layer in layers)


def _layers_of(chunk: DDP) -> list[tuple[int, LayerReplay]]:
    from megatron.core.transformer.moe.router import TopKRouter

    found = []
    for name, module in unwrap_model(chunk).named_modules():
        if not isinstance(module, TopKRouter) or name.startswith("mtp."):
            continue
        if not isinstance(module.router_replay, LayerReplay):
            raise RuntimeError(
                f"routing replay: {name} is {type(module).__name__} without replay; a custom layer spec must use "
                "slime.backends.megatron_utils.moe.router.PackedTopKRouter"
            )
        found.append((module.layer_number - 1, module.router_replay))
    return found


def pack_experts(
    experts: Sequence[Tensor], lengths: Sequence[int], pad_multiplier: int, sequence_parallel: bool
) -> Tensor:
    """The engine's choices in the order in which this rank's routers see the tokens of a packed micro-batch.

    Tokens that the engine didn't route (the last one, trailing tool output, padding) are left to the router.

    Args:
        experts: per sample, [tokens that the engine routed, layers, top-k].
        lengths: per sample, its tokens.

    Returns:
        [local tokens, layers, top-k].
    """
    from megatron.core import parallel_state as mpu

    from slime.backends.megatron_utils.cp_utils import slice_with_cp

    parts = [
        slice_with_cp(_extend(rows, length - len(rows)), _extend)
        for rows, length in zip(experts, lengths, strict=True)
    ]
    packed = torch.cat(parts)
    packed = _extend(packed, packed_padding(len(packed), pad_multiplier))
    if sequence_parallel:
        packed = packed.chunk(mpu.get_tensor_model_parallel_world_size())[mpu.get_tensor_model_parallel_rank()]
    return packed


def _extend(rows: Tensor, missing: int) -> Tensor:
    return torch.cat([rows, rows.new_full((missing, *rows.shape[1:]), OWN_CHOICE)]) if missing else rows
