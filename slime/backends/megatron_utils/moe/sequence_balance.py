"""The balancing loss of single sequences, in micro-batches that pack several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from slime.backends.megatron_utils.cp_utils import current_context_parallel, slice_with_cp


@dataclass(frozen=True)
class PackedSequences:
    """Which sequence each token of a packed micro-batch belongs to.

    Attributes:
        ids: [local tokens], the sequence's number; the number of sequences where a token is padding.
        lengths: [sequences], tokens of each on all ranks together.
        weight: of each sequence in the micro-batch's loss.
    """

    ids: Tensor
    lengths: Tensor
    weight: float


def describe_packed(
    sequences: Sequence[Tensor], packed_length: int, weight: float, sequence_parallel: bool
) -> PackedSequences:
    """As this rank's routers see the micro-batch.

    Args:
        sequences: per sample, the whole sequence.
        packed_length: tokens that the context-parallel rank has, padding included.
    """
    from megatron.core import parallel_state as mpu

    cp, none = current_context_parallel(), len(sequences)
    parts = [slice_with_cp(torch.full((len(tokens),), i), none, cp) for i, tokens in enumerate(sequences)]
    ids = torch.cat(parts)
    ids = F.pad(ids, (0, packed_length - len(ids)), value=none)
    if sequence_parallel:
        ids = ids.chunk(mpu.get_tensor_model_parallel_world_size())[mpu.get_tensor_model_parallel_rank()]
    device = sequences[0].device
    lengths = torch.tensor([float(len(tokens)) for tokens in sequences])
    return PackedSequences(ids.to(device), lengths.to(device), weight)


def sequence_balancing_loss(
    scores: Tensor, chosen: Tensor, packed: PackedSequences, top_k: int, group: dist.ProcessGroup
) -> Tensor:
    """weight · Σ_s E · Σ_e f_se P_se (DeepSeek-V3, arXiv:2412.19437 eq. 17-20), this rank's part of it.

    f_se is the share of sequence s's choices that fall on expert e, P_se the expert's mean normalised score; 1 when
    balanced.

    Args:
        scores: [local tokens, experts], normalised over experts; 0 for padding.
        chosen: the same shape, 1 where the token's top-k are.
        group: the ranks that have the other tokens of the same sequences.
    """
    count = len(packed.lengths)

    def per_sequence(values: Tensor) -> Tensor:
        sums = values.new_zeros(count + 1, values.shape[1])
        return sums.index_add(0, packed.ids, values)[:count]

    choices = per_sequence(chosen.to(scores.dtype))
    dist.all_reduce(choices, group=group)
    shares = choices / (top_k * packed.lengths[:, None])
    means = per_sequence(scores) / packed.lengths[:, None]
    return packed.weight * scores.shape[1] * (shares * means).sum()


def announce_sequences(model: torch.nn.Module, batch: dict[str, Any], weight: float) -> None:
    """Tell the chunk's routers which sequences the training pass that follows has.

    Passes with gradients (the forward pass, or its recomputation in the backward pass) come in the order of the
    announcements.

    Args:
        model: the model chunk, without wrappers.
        weight: of each sequence, see `PackedSequences`.
    """
    from slime.backends.megatron_utils.moe.router import PackedTopKRouter

    routers = [
        module
        for name, module in model.named_modules()
        if isinstance(module, PackedTopKRouter)
        and not name.startswith("mtp.")
        and module.get_aux_loss_coeff("seq_aux_loss") > 0
    ]
    if routers:
        length, sequence_parallel = batch["tokens"].shape[1], model.config.sequence_parallel
        packed = describe_packed(batch["unconcat_tokens"], length, weight, sequence_parallel)
        for router in routers:
            router.announced.append(packed)
