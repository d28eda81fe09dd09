"""Buckets of named tensors as SGLang's POST /update_weights_from_tensor takes them (load_format flattened_bucket).

A bucket is one flat tensor and where each named tensor lies in it. Neither SGLang nor its classes are imported for it:
the server reads the metadata by attribute. Written for sglang 0.5.23.
"""

from __future__ import annotations

import base64
import functools
import io
import logging
import pickle
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
_PART_BYTES = 64 * 1024 * 1024


class SharedMemory:
    """Memory that a server reads too, for buckets one after the other: new pages cost as much as filling them."""

    def __init__(self) -> None:
        self._storage: torch.UntypedStorage | None = None

    def take(self, size: int) -> Tensor | None:
        """`size` bytes of it, which are made if there are fewer; None if there is no room for them. Call it with torch
        sharing by file name."""
        if self._storage is None or self._storage.nbytes() < size:
            self._storage = None
            if shutil.disk_usage(_SHARED_MEMORY).free <= size + _SPARE_BYTES:
                return None
            self._storage = torch.UntypedStorage._new_shared(size)
        return torch.empty(0, dtype=torch.uint8).set_(self._storage)[:size]


class TensorPayload:
    """A serialised bucket; keep it until the server has read it, because its memory may be shared.

    A bucket on a device goes by reference to the device's memory, one in host memory by reference to shared memory, or
    by value (15 times slower) when that has no room.

    Args:
        memory: for a bucket in host memory, that of an earlier bucket which the server has read.

    Attributes:
        text: what is sent.
    """

    def __init__(self, named_tensors: Sequence[tuple[str, Tensor]], memory: SharedMemory | None = None) -> None:
        metadata, size = layout(named_tensors)
        device = named_tensors[0][1].device
        if device.type != "cpu":
            self._flat = fill(torch.empty(size, dtype=torch.uint8, device=device), named_tensors, metadata)
            pickled = _pickle_on_device(self._flat, metadata)
        else:
            with _file_system_sharing():
                flat = (memory or SharedMemory()).take(size)
                if flat is not None:
                    self._flat = fill(flat, named_tensors, metadata)
                    pickled = _fork_pickle(self._flat, metadata)
            if flat is None:
                _warn_by_value()
                self._flat = fill(torch.empty(size, dtype=torch.uint8), named_tensors, metadata)
                pickled = pickle.dumps(_bucket(self._flat, metadata))
        self.text = base64.b64encode(pickled).decode()


def parts(named_tensors: Sequence[tuple[str, Tensor]]) -> Iterator[Sequence[tuple[str, Tensor]]]:
    """A bucket in the parts that are best sent one by one: whole from a device; from host memory in runs of at most
    64 MiB (a larger tensor stands alone), so that little memory need be shared, and one part is laid out while the
    server loads another."""
    if named_tensors[0][1].device.type != "cpu":
        yield named_tensors
        return
    start = size = 0
    for index, (_, tensor) in enumerate(named_tensors):
        if index > start and size + tensor.nbytes > _PART_BYTES:
            yield named_tensors[start:index]
            start, size = index, 0
        size += tensor.nbytes
    yield named_tensors[start:]


def layout(named_tensors: Sequence[tuple[str, Tensor]]) -> tuple[list[SimpleNamespace], int]:
    """Where each tensor lies in the flat one: name, shape, dtype, start_idx, end_idx, numel (in bytes); and its size.

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
    return metadata, end


def fill(flat: Tensor, named_tensors: Sequence[tuple[str, Tensor]], metadata: Sequence[Any]) -> Tensor:
    """Copy every tensor to its place in the byte tensor `flat`; `flat`."""
    for (_, tensor), entry in zip(named_tensors, metadata, strict=True):
        place = flat[entry.start_idx : entry.end_idx].view(entry.dtype).view(entry.shape)
        place.copy_(tensor.detach())
    return flat


def _bucket(flat: Tensor, metadata: Sequence[SimpleNamespace]) -> dict[str, Any]:
    return {"flattened_tensor": flat, "metadata": metadata}


def _pickle_on_device(flat: Tensor, metadata: Sequence[SimpleNamespace]) -> bytes:
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

    monkey_patch_torch_reductions()  # names a device by its UUID: the server may number devices differently
    return _fork_pickle(flat, metadata)


def _fork_pickle(flat: Tensor, metadata: Sequence[SimpleNamespace]) -> bytes:
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(_bucket(flat, metadata))
    return buffer.getvalue()


@contextmanager
def _file_system_sharing() -> Iterator[None]:
    """By file descriptor, torch's default, a tensor would kill the server, which can't ask this process for it."""
    previous = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(previous)


@functools.cache
def _warn_by_value() -> None:
    """Once in a process."""
    logger.warning(
        "%s has no room for a bucket of weights: they are sent by value, which is slow "
        "(make it larger, in a container with --shm-size, or lower --update-weight-buffer-size)",
        _SHARED_MEMORY,
    )
