"""Lazy access to the tensors of a Hugging Face directory, be it one safetensors file or several with an index."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from torch import Tensor

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
}


class SafetensorReader:
    """Reads tensors by name, on the CPU; files are opened once and memory-mapped.

    Raises:
        FileNotFoundError: the directory has neither an index nor a single file, or lacks a file that the index names.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file_of = file_of_each_tensor(self.path)
        self._open_files: dict[str, Any] = {}

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._file_of)

    def get_tensor(self, name: str) -> Tensor:
        """The tensor called `name`; KeyError names it and the directory."""
        if name not in self._file_of:
            raise KeyError(f"{self.path} has no tensor {name!r}")
        return self._open(self._file_of[name]).get_tensor(name)

    def get_row(self, name: str, index: int) -> Tensor:
        """Entry `index` of the tensor's first dimension; no more of it is read."""
        if name not in self._file_of:
            raise KeyError(f"{self.path} has no tensor {name!r}")
        return self._open(self._file_of[name]).get_slice(name)[index]

    def describe(self, name: str) -> tuple[list[int], int, bool]:
        """Shape of the tensor called `name`, the bytes it takes in the files, and whether that is low precision."""
        shape, size = self._stored(name)
        return shape, size, False

    def in_file_order(self) -> list[str]:
        """All names, those of a file together."""
        return sorted(self.names, key=lambda name: (self._file_of.get(name, ""), name))

    def _stored(self, name: str) -> tuple[list[int], int]:
        if name not in self._file_of:
            raise KeyError(f"{self.path} has no tensor {name!r}")
        entry = self._open(self._file_of[name]).get_slice(name)
        shape = entry.get_shape()
        return shape, math.prod(shape) * _BITS[entry.get_dtype()] // 8

    def _open(self, file_name: str) -> Any:
        if file_name not in self._open_files:
            from safetensors import safe_open

            self._open_files[file_name] = safe_open(self.path / file_name, framework="pt", device="cpu")
        return self._open_files[file_name]


def file_of_each_tensor(path: Path) -> dict[str, str]:
    """The file, by its name in the folder, that holds each tensor.

    Raises:
        FileNotFoundError: as `SafetensorReader`.
    """
    if (path / INDEX_FILE).is_file():
        file_of = json.loads((path / INDEX_FILE).read_text())["weight_map"]
        missing = sorted({name for name in set(file_of.values()) if not (path / name).is_file()})
        if missing:
            raise FileNotFoundError(f"{path / INDEX_FILE} names files that do not exist: {', '.join(missing)}")
        return file_of
    if (path / SINGLE_FILE).is_file():
        from safetensors import safe_open

        with safe_open(path / SINGLE_FILE, framework="pt") as tensors:
            return dict.fromkeys(tensors.keys(), SINGLE_FILE)
    raise FileNotFoundError(f"{path} holds neither {INDEX_FILE} nor {SINGLE_FILE}")
