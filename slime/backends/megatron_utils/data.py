"""From a rank's rollout data to packed micro-batches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from slime.backends.megatron_utils.cp_utils import current_context_parallel, slice_with_cp
from slime.utils.types import RolloutBatch

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams

# Columns with one tensor per sample; they move to the trainer's device. Those over response tokens that come from the
# engine or a teacher are cut to what the context-parallel rank holds, as the trainer's own are from the start.
DEVICE_COLUMNS = ("tokens", "loss_masks", "rollout_log_probs", "teacher_log_probs")
RESPONSE_COLUMNS = ("rollout_log_probs", "teacher_log_probs")
PAD_TOKEN = 0


class DataIterator:
    """Yields the micro-batches of a rollout in schedule order.

    Args:
        rollout_data: columns, lists with one entry per sample of this rank.
        micro_batch_indices: [micro-batch][j], positions of its samples in the columns.
    """

    def __init__(self, rollout_data: RolloutBatch, micro_batch_indices: Sequence[Sequence[int]]) -> None:
        self.rollout_data = rollout_data
        self.micro_batch_indices = micro_batch_indices
        self.offset = 0

    def get_next(self, keys: Sequence[str]) -> dict[str, Any]:
        """The next micro-batch's entries of these columns; None for a column that the rollout data lacks.

        Raises:
            StopIteration: all micro-batches were taken.
        """
        if self.offset >= len(self.micro_batch_indices):
            raise StopIteration(f"the rollout has {len(self.micro_batch_indices)} micro-batches")
        indices = self.micro_batch_indices[self.offset]
        self.offset += 1
        batch: dict[str, Any] = {}
        for key in keys:
            column = self.rollout_data.get(key)
            batch[key] = None if column is None else [column[i] for i in indices]
        return batch

    def reset(self) -> DataIterator:
        """Start again at the first micro-batch."""
        self.offset = 0
        return self


def get_data_iterator(rollout_data: RolloutBatch) -> list[DataIterator]:
    """One iterator per model chunk of this rank (several with virtual stages), over the same micro-batches."""
    from megatron.core import parallel_state as mpu

    chunks = mpu.get_virtual_pipeline_model_parallel_world_size() or 1
    return [DataIterator(rollout_data, rollout_data["micro_batch_indices"]) for _ in range(chunks)]


def get_batch(data_iterator: DataIterator, keys: Sequence[str], pad_multiplier: int = 128) -> dict[str, Any]:
    """The next micro-batch with its sequences packed one after the other, for this context-parallel rank.

    Args:
        keys: columns to take along; `tokens` among them.
        pad_multiplier: the packed length is padded to a multiple of tensor-parallel size times this. Padding is a
            sequence of its own, which no other sequence attends to.

    Returns:
        The columns, and `tokens` [1, packed length], `padding_mask` (the same shape, true where a token is padding),
        `unconcat_tokens` (the whole sequences), `packed_seq_params`.
    """
    batch = data_iterator.get_next(keys)
    sequences = batch["tokens"]
    batch["unconcat_tokens"] = sequences
    batch["tokens"], batch["packed_seq_params"] = pack_sequences(sequences, pad_multiplier)
    batch["padding_mask"] = padding_mask(sequences, batch["tokens"].shape[1])
    return batch


def pack_sequences(sequences: Sequence[torch.Tensor], pad_multiplier: int) -> tuple[torch.Tensor, PackedSeqParams]:
    """(tokens [1, packed length] of this context-parallel rank, boundaries of the whole sequences)."""
    from megatron.core.packed_seq_params import PackedSeqParams

    cp = current_context_parallel()
    parts = [slice_with_cp(tokens, PAD_TOKEN, cp) for tokens in sequences]
    lengths = [len(part) for part in parts]
    packed = torch.cat(parts)
    if padding := packed_padding(len(packed), pad_multiplier):
        packed = F.pad(packed, (0, padding), value=PAD_TOKEN)
        lengths.append(padding)
    boundaries = [0, *itertools.accumulate(length * cp.size for length in lengths)]
    cu_seqlens = torch.tensor(boundaries, dtype=torch.int32, device=packed.device)
    longest = max(lengths) * cp.size
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    return packed[None], params


def padding_mask(sequences: Sequence[torch.Tensor], packed_length: int) -> torch.Tensor:
    """[1, packed length] on this context-parallel rank, true where no token of a sequence stands."""
    cp = current_context_parallel()
    real = [torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device) for tokens in sequences]
    mask = torch.cat([slice_with_cp(part, True, cp) for part in real])
    return F.pad(mask, (0, packed_length - len(mask)), value=True)[None]


def packed_padding(length: int, pad_multiplier: int) -> int:
    """Tokens of padding behind `length` packed ones on this context-parallel rank."""
    multiple = _tensor_parallel_size() * pad_multiplier
    if current_context_parallel().size > 1:
        multiple = math.lcm(multiple, 2)  # the padding, too, is two chunks on each rank
    return -length % multiple


def _tensor_parallel_size() -> int:
    if not dist.is_initialized():
        return 1
    from megatron.core import parallel_state as mpu

    return mpu.get_tensor_model_parallel_world_size()


def prepare_rollout_data(rollout_data: RolloutBatch, device: torch.device, takes_images: bool = False) -> RolloutBatch:
    """Move per-token columns to the device and cut those over responses to this context-parallel rank's tokens.

    Images stay where they are; each micro-batch's go to the device with it.

    Args:
        takes_images: the model has a vision tower.

    Raises:
        ValueError: a sample has inputs beside text that the model doesn't take.
    """
    from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp
    from slime.backends.megatron_utils.vision.inputs import check_images

    for index, inputs in enumerate(rollout_data.get("multimodal_train_inputs") or []):
        if inputs and not takes_images:
            raise ValueError(
                f"sample {index} of this rank has multimodal_train_inputs ({', '.join(inputs)}): the trainer holds a "
                "text model (--vision-tower off) and would train as if they were not there"
            )
        check_images(index, inputs or {})
    cp = current_context_parallel()
    for key in DEVICE_COLUMNS:
        column = rollout_data.get(key)
        if column is None:
            continue
        if key in RESPONSE_COLUMNS:
            lengths = zip(column, rollout_data["total_lengths"], rollout_data["response_lengths"], strict=True)
            column = [slice_log_prob_with_cp(x, total, response, cp) for x, total, response in lengths]
        rollout_data[key] = tensors_to_gpu(column, device)
    return rollout_data


def tensors_to_cpu(tensor_list: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies on the host; what is there already stays."""
    return [tensor.detach().cpu() for tensor in tensor_list]


def tensors_to_gpu(tensor_list: Sequence[torch.Tensor], device: torch.device | None = None) -> list[torch.Tensor]:
    """On the trainer's device (or `device`); what is there already stays."""
    if device is None:
        from slime.utils import accelerator

        device = accelerator.current().device()
    return [tensor.to(device, non_blocking=True) for tensor in tensor_list]
