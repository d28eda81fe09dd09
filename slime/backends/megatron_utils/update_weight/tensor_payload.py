"""Buckets of named tensors as SGLang's POST /update_weights_from_tensor takes them (load_format flattened_bucket).

A bucket is one flat tensor and where each named tensor lies in it. Neither SGLang nor its classes are imported for it:
the server reads the metadata by attribute. Written for sglang 0.5.23.
"""

from __future__ import annotations

import base64
import io
import logging
import pickle
import shutil
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing
from torch import Tensor

logger = logging.getLogger(__name__)

LOAD_FORMAT = "flattened_bucket"
_SHARED_MEMORY = "/dev/shm"
_SPARE_BYTES = 32 * 1024 * 1024
_ALIGNMENT = 16


class TensorPayload:
    """A serialised bucket; keep it until the server has read it, because its memory may be shared.

    Attributes:
        text: what is sent.
    """

    def __init__(self, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
        flat, metadata = flatten(named_tensors)
        self._bucket = {"flattened_tensor": flat, "metadata": metadata}
        self.text = base64.b64encode(_dump(self._bucket)).decode()


def flatten(named_tensors: Sequence[tuple[str, Tensor]]) -> tuple[Tensor, list[SimpleNamespace]]:
    """One byte tensor that holds all, and for each: name, shape, dtype, start_idx, end_idx, numel (in bytes).

    Each begins at a multiple of 16 bytes, so that tensors of several dtypes can be viewed in place.

    Raises:
        ValueError: there are none.
    """
    if not named_tensors:
        raise ValueError("a bucket of weights must hold a tensor")
    metadata, end = [], 0
    for name, tensor in named_tensors:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        size = tensor.numel() * tensor.element_size()
        end = start + size
        metadata.append(
            SimpleNamespace(
                name=name, shape=tensor.shape, dtype=tensor.dtype, start_idx=start, end_idx=end, numel=size
            )
        )
    flat = torch.empty(end, dtype=torch.uint8, device=named_tensors[0][1].device)
    for (_, tensor), entry in zip(named_tensors, metadata, strict=True):
        flat[entry.start_idx : entry.end_idx].copy_(tensor.detach().contiguous().view(-1).view(torch.uint8))
    return flat, metadata


def _dump(bucket: dict[str, Any]) -> bytes:
    """Pickle by reference to memory that the server can map; by value when the host has no room for that."""
    flat: Tensor = bucket["flattened_tensor"]
    if not flat.is_cpu:
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        monkey_patch_torch_reductions()  # names a device by its UUID: the server may number devices differently
        return _fork_pickle(bucket)
    if shutil.disk_usage(_SHARED_MEMORY).free < flat.numel() + _SPARE_BYTES:
        logger.warning("%s has no room for a bucket of %d bytes: weights go by value", _SHARED_MEMORY, flat.numel())
        return pickle.dumps(bucket)
    # By file descriptor, torch's default, the tensor would kill the server, which can't ask this process for it.
    previous = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        return _fork_pickle(bucket)
    finally:
        torch.multiprocessing.set_sharing_strategy(previous)


def _fork_pickle(bucket: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(bucket)
    return buffer.getvalue()
