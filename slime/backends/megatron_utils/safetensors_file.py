"""Writing safetensors files without copying what is written.

The library's `save_file` refuses tensors that share memory and makes bytes of all of them first. The format is a
length, a JSON header and the raw data: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNMENT = 8


def write_safetensors(path: Path, tensors: Sequence[tuple[str, Tensor]]) -> int:
    """Write named tensors to a file that is on disk when this returns; the bytes of their data.

    At most one tensor is copied at a time: one that is on a device or not contiguous.

    Raises:
        ValueError: two tensors have one name, or one has a dtype that the format lacks.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors:
        if name in header:
            raise ValueError(f"{path}: there are two tensors called {name}")
        if tensor.dtype not in _DTYPES:
            raise ValueError(f"{path}: {name} has the dtype {tensor.dtype}, which safetensors has no name for")
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with open(path, "wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in tensors:
            host = tensor.detach().cpu().contiguous()
            stream.write(memory_of(host))
        stream.flush()
        os.fsync(stream.fileno())
    return end


def memory_of(host: Tensor) -> bytes | ctypes.Array[ctypes.c_char]:
    """A contiguous CPU tensor's data, in place, for as long as the tensor lives.

    Not by `numpy()`: that makes a storage one that can't be resized, and so keeps a trainer's weights from being
    swapped out.
    """
    size = host.numel() * host.element_size()
    return (ctypes.c_char * size).from_address(host.data_ptr()) if size else b""
