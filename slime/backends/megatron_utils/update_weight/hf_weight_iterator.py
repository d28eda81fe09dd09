"""The trainer's weights as full Hugging Face tensors, in buckets of bounded size."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from slime.backends.megatron_utils.families import Family, ModelShape, family_of_checkpoint, shape_from_model
from slime.backends.megatron_utils.families.table import OUTPUT_LAYER, ExpertStacks
from slime.backends.megatron_utils.lora.merge import AdapterMerger
from slime.backends.megatron_utils.lora.weights import named_adapters
from slime.backends.megatron_utils.low_precision import scheme_of_checkpoint
from slime.backends.megatron_utils.update_weight.common import (
    named_params_and_buffers,
    tensor_parallel_group,
    tensor_parallel_rank_and_size,
    unwrap_model,
)
from slime.utils.accelerator import current

NamedTensors = list[tuple[str, Tensor]]


@dataclasses.dataclass(frozen=True)
class ParamInfo:
    """What every rank knows about one weight: its shard's shape and dtype, and which stage and expert rank hold it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pipeline_rank: int
    expert_rank: int | None  # None: not an expert's weight
    full_bytes: int


class HfWeightIterator:
    """Yields all weights of the model as full Hugging Face tensors.

    Every rank takes part in every step, and every rank gets every full tensor: a weight goes from the stage (and
    expert rank) that holds it to all others, then the tensor-parallel shards are gathered and converted by the
    family's table, and quantised where `args.hf_checkpoint` stores the weight in low precision. The order is the same
    on all ranks and in every call. Tensors may share memory with the weights that they come from: read them, don't
    change them. With LoRA they are the base's and the adapters' together.

    Args:
        own_stage_only: leave out what other pipeline stages hold, so that stages can send side by side.
    """

    def __init__(
        self, args: argparse.Namespace, model: Sequence[torch.nn.Module], own_stage_only: bool = False
    ) -> None:
        from megatron.core import parallel_state

        self._args = args
        self._model = model
        self._merger = AdapterMerger(model)
        self._family: Family = family_of_checkpoint(args.hf_checkpoint)
        self._shape: ModelShape = shape_from_model(args, unwrap_model(model[0]).config)
        self._scheme = scheme_of_checkpoint(args.hf_checkpoint)
        self._infos = _agree_on_infos(self._local_infos())
        if own_stage_only:
            stage = parallel_state.get_pipeline_model_parallel_rank()
            self._infos = [info for info in self._infos if info.pipeline_rank == stage]
        self._over_stages = parallel_state.get_pipeline_model_parallel_world_size() > 1 and not own_stage_only
        self._buckets = pack_buckets(self._infos, args.update_weight_buffer_size)

    @property
    def num_chunks(self) -> int:
        return len(self._buckets)

    @property
    def total_bytes(self) -> int:
        """Of all weights that are yielded, before quantisation and with Megatron's padding of the vocabulary."""
        return sum(info.full_bytes for info in self._infos)

    @torch.no_grad()
    def chunks(self, weights: Mapping[str, Tensor] | None = None) -> Iterator[NamedTensors]:
        """Buckets of (Hugging Face name, full contiguous tensor on the trainer's device).

        A bucket holds at most `args.update_weight_buffer_size` bytes, or one Megatron weight that is larger, and what
        it completes of a checkpoint's tensors that hold all experts of a layer.

        Args:
            weights: this rank's shards by global name (as `WeightsBackuper.get` returns them); default the live model.
        """
        if weights is None:
            weights = dict((*named_params_and_buffers(self._args, self._model), *named_adapters(self._model)))
        stacks = ExpertStacks(self._shape.num_experts)
        for bucket in self._buckets:
            shards = self._broadcast_over_stages(bucket, weights)
            named = self._gather_and_convert(bucket, shards, stacks)
            if named:
                yield named
        stacks.check_complete()

    def _local_infos(self) -> list[ParamInfo]:
        from megatron.core import parallel_state

        infos = []
        for name, tensor in named_params_and_buffers(self._args, self._model):
            if name == OUTPUT_LAYER and self._shape.tied_embeddings:
                continue  # the last stage's copy of the embedding
            bound = self._family.bind(name, self._shape.num_layers)
            copies = tensor_parallel_rank_and_size(bound.is_expert)[1] if bound.row.layout.tp_dim is not None else 1
            infos.append(
                ParamInfo(
                    name=name,
                    shape=tuple(tensor.shape),
                    dtype=tensor.dtype,
                    pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
                    expert_rank=parallel_state.get_expert_model_parallel_rank() if bound.is_expert else None,
                    full_bytes=tensor.numel() * tensor.element_size() * copies,
                )
            )
        return infos

    def _broadcast_over_stages(self, bucket: Sequence[ParamInfo], weights: Mapping[str, Tensor]) -> list[Tensor]:
        """This rank's tensor-parallel shard of each weight, whoever held it."""
        from megatron.core import parallel_state as ps

        device = current().device()
        shards, handles = [], []
        for info in bucket:
            own = weights.get(info.name)
            if own is None:
                shard = torch.empty(info.shape, dtype=info.dtype, device=device)
            else:
                shard = self._merger.merged(info.name, own.detach().to(device), weights).contiguous()
            holds_expert = info.expert_rank is None or info.expert_rank == ps.get_expert_model_parallel_rank()
            if self._over_stages and holds_expert:
                group = ps.get_pipeline_model_parallel_group()
                handles.append(dist.broadcast(shard, group=group, group_src=info.pipeline_rank, async_op=True))
            shards.append(shard)
        _wait(handles)
        if ps.get_expert_model_parallel_world_size() > 1:
            group = ps.get_expert_model_parallel_group()
            _wait(
                dist.broadcast(shard, group=group, group_src=info.expert_rank, async_op=True)
                for info, shard in zip(bucket, shards, strict=True)
                if info.expert_rank is not None
            )
        return shards

    def _gather_and_convert(
        self, bucket: Sequence[ParamInfo], shards: Sequence[Tensor], stacks: ExpertStacks
    ) -> NamedTensors:
        gathered, handles = [], []
        for info, shard in zip(bucket, shards, strict=True):
            is_expert, layout = (
                info.expert_rank is not None,
                self._family.bind(info.name, self._shape.num_layers).row.layout,
            )
            size = tensor_parallel_rank_and_size(is_expert)[1]
            if size == 1 or layout.tp_dim is None:
                gathered.append([shard])
                continue
            gathered.append([torch.empty_like(shard) for _ in range(size)])
            handles.append(dist.all_gather(gathered[-1], shard, group=tensor_parallel_group(is_expert), async_op=True))
        _wait(handles)
        named: NamedTensors = []
        for info, parts in zip(bucket, gathered, strict=True):
            bound = self._family.bind(info.name, self._shape.num_layers)
            for name, tensor in stacks.add(bound, bound.to_hf(bound.row.layout.gather(parts), self._shape)):
                named.extend([(name, tensor)] if self._scheme is None else self._scheme.quantize(name, tensor))
        return named


def pack_buckets(infos: Sequence[ParamInfo], max_bytes: int) -> list[list[ParamInfo]]:
    """`infos` in order, cut into runs of at most `max_bytes`; a larger weight stands alone."""
    buckets: list[list[ParamInfo]] = []
    used = 0
    for info in infos:
        if not buckets or used + info.full_bytes > max_bytes:
            buckets.append([])
            used = 0
        buckets[-1].append(info)
        used += info.full_bytes
    return buckets


def _agree_on_infos(local: list[ParamInfo]) -> list[ParamInfo]:
    """The weights of the whole model, in the same order on every rank."""
    from megatron.core import parallel_state as ps

    # shards of one weight look alike: one tensor- and data-parallel rank speaks for its stage and expert rank
    speaks_for_experts = ps.get_expert_data_parallel_rank() == 0 and ps.get_expert_tensor_parallel_rank() == 0
    speaks = ps.get_data_parallel_rank(with_context_parallel=True) == 0 and ps.get_tensor_model_parallel_rank() == 0
    mine = [info for info in local if (speaks if info.expert_rank is None else speaks_for_experts)]
    by_rank: list[list[ParamInfo]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(by_rank, mine)
    unique = {info.name: info for infos in by_rank for info in infos}
    return sorted(unique.values(), key=lambda info: _natural_order(info.name))


def _natural_order(name: str) -> tuple[object, ...]:
    """Sort key with numbers as numbers; the pieces alternate between text and number, so keys always compare."""
    return tuple(int(piece) if index % 2 else piece for index, piece in enumerate(re.split(r"(\d+)", name)))


def _wait(handles: object) -> None:
    for handle in list(handles):  # type: ignore[call-overload]
        handle.wait()
