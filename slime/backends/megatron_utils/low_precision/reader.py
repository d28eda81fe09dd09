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
        self._stored = scheme.stored_weights(super().names)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._scheme.owner(name) or name for name in super().names)

    def get_tensor(self, name: str) -> Tensor:
        if name in self._stored:
            return self._scheme.dequantize(name, super().get_tensor, super().names)
        return super().get_tensor(name)
