"""Reading a Hugging Face folder in full precision, whatever it stores."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from slime.backends.megatron_utils.hf_to_megatron.reader import SafetensorReader
from slime.backends.megatron_utils.low_precision.config import scheme_of_checkpoint
from slime.backends.megatron_utils.low_precision.scheme import Scheme


def open_weights(path: str | Path) -> SafetensorReader:
    """A reader that gives low-precision weights as float32, under the names that they have in full precision.

    Raises:
        ValueError: the folder's `quantization_config` is of an unknown kind.
    """
    scheme = scheme_of_checkpoint(path)
    return SafetensorReader(path) if scheme is None else DequantizingReader(path, scheme)


class DequantizingReader(SafetensorReader):
    """Takes a scheme's tensors for the weights that they stand for."""

    def __init__(self, path: str | Path, scheme: Scheme) -> None:
        super().__init__(path)
        self._scheme = scheme
        self._raw_names = super().names
        self._stored_low = scheme.stored_weights(self._raw_names)
        self._parts: dict[str, list[str]] = {}
        for part in self._raw_names:
            self._parts.setdefault(scheme.owner(part) or part, []).append(part)
        self._names = frozenset(scheme.owner(name) or name for name in self._raw_names)

    @property
    def names(self) -> frozenset[str]:
        return self._names

    def get_tensor(self, name: str) -> Tensor:
        if name in self._stored_low:
            return self._scheme.dequantize(name, super().get_tensor, self._raw_names)
        return super().get_tensor(name)

    def describe(self, name: str) -> tuple[list[int], int, bool]:
        if name not in self._stored_low:
            return super().describe(name)
        size = sum(self._stored(part)[1] for part in self._parts[name])
        return self._scheme.full_shape(name, self._stored, super().get_tensor), size, True

    def in_file_order(self) -> list[str]:
        owners = (self._scheme.owner(name) or name for name in sorted(self._file_of, key=self._file_of.__getitem__))
        return list(dict.fromkeys(owners))
