"""How a checkpoint stores weights in low precision: which ones, and under which names."""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Sequence

from torch import Tensor

from slime.backends.megatron_utils.low_precision import fp8, int4
from slime.backends.megatron_utils.low_precision.selection import selects

WEIGHT = ".weight"
NEVER = ("embed_tokens",)  # a matrix, but no linear layer


class Scheme(abc.ABC):
    """How single weights are stored in low precision.

    Args:
        left_out: modules that keep their precision, see `selection`.
    """

    companions: tuple[str, ...]  # endings of the tensors that stand for a weight, in place of `.weight`
    bits: int  # of a stored number

    def __init__(self, left_out: Collection[str] = ()) -> None:
        self._is_left_out = selects((*NEVER, *left_out))
        self._stored: frozenset[str] | None = None

    def covers(self, name: str, weight: Tensor) -> bool:
        """Whether the weight with this Hugging Face name is stored in low precision."""
        if not name.endswith(WEIGHT) or weight.dim() != 2:
            return False
        if self._stored is not None:
            return name in self._stored
        return not self._is_left_out(name.removesuffix(WEIGHT))

    def quantize(self, name: str, weight: Tensor) -> list[tuple[str, Tensor]]:
        """The tensors that stand for a weight: itself if it keeps its precision.

        Raises:
            ValueError: it can't be quantised; the message names it.
        """
        if not self.covers(name, weight):
            return [(name, weight)]
        try:
            return self._quantize(name.removesuffix(WEIGHT), weight)
        except ValueError as error:
            raise ValueError(f"{name} of shape {tuple(weight.shape)}: {error}") from error

    def owner(self, name: str) -> str | None:
        """The weight that a tensor with this name stands for; None for a tensor that is stored as it is."""
        for ending in self.companions:
            if name.endswith(ending):
                return name.removesuffix(ending) + WEIGHT
        return None

    def stored_weights(self, names: Collection[str]) -> frozenset[str]:
        """The weights that a checkpoint with these tensors stores in low precision."""
        return frozenset(owner for owner in map(self.owner, names) if owner is not None)

    def follow(self, names: Collection[str]) -> None:
        """From now on cover what a checkpoint with these tensors stores in low precision, and nothing else."""
        self._stored = self.stored_weights(names)

    def check(self, name: str, shape: Sequence[int]) -> None:
        """ValueError if a covered weight of this shape can't be quantised."""
        return

    def full_shape(
        self, name: str, stored: Callable[[str], tuple[list[int], int]], read: Callable[[str], Tensor]
    ) -> list[int]:
        """The shape of a weight that is stored in low precision."""
        return stored(name)[0]

    @abc.abstractmethod
    def _quantize(self, module: str, weight: Tensor) -> list[tuple[str, Tensor]]: ...

    @abc.abstractmethod
    def dequantize(self, name: str, read: Callable[[str], Tensor], names: Collection[str]) -> Tensor:
        """The float32 weight called `name`, out of a checkpoint that has `names`."""


class BlockFP8(Scheme):
    """FP8 with a scale per block: `weight`, `weight_scale_inv` (which multiplies, in spite of its name)."""

    companions = (".weight_scale_inv",)
    bits = 8

    def __init__(self, block: tuple[int, int], *, ue8m0: bool = False, left_out: Collection[str] = ()) -> None:
        super().__init__(left_out)
        self._block, self._ue8m0 = block, ue8m0

    def _quantize(self, module: str, weight: Tensor) -> list[tuple[str, Tensor]]:
        quantized, scales = fp8.quantize_blocks(weight, self._block, ue8m0=self._ue8m0)
        return [(f"{module}.weight", quantized), (f"{module}.weight_scale_inv", scales)]

    def dequantize(self, name: str, read: Callable[[str], Tensor], names: Collection[str]) -> Tensor:
        return fp8.dequantize(read(name), read(f"{name}_scale_inv"), self._block)


class TensorFP8(Scheme):
    """FP8 with one scale per weight: `weight`, `weight_scale`."""

    companions = (".weight_scale", ".weight_scale_inv")  # transformers writes the second name
    bits = 8

    def _quantize(self, module: str, weight: Tensor) -> list[tuple[str, Tensor]]:
        quantized, scale = fp8.quantize_tensor(weight)
        return [(f"{module}.weight", quantized), (f"{module}.weight_scale", scale)]

    def dequantize(self, name: str, read: Callable[[str], Tensor], names: Collection[str]) -> Tensor:
        scale = f"{name}_scale" if f"{name}_scale" in names else f"{name}_scale_inv"
        return fp8.dequantize(read(name), read(scale), None)


class PackedINT4(Scheme):
    """compressed-tensors' INT4: `weight_packed`, `weight_scale`, `weight_shape`."""

    companions = (".weight_packed", ".weight_scale", ".weight_shape", ".weight_zero_point")
    bits = 4

    def __init__(self, group_size: int, left_out: Collection[str] = ()) -> None:
        super().__init__(left_out)
        self._group_size = group_size

    def check(self, name: str, shape: Sequence[int]) -> None:
        if shape[1] % self._group_size:
            raise ValueError(
                f"{name} has {shape[1]} columns, which groups of {self._group_size} don't divide: leave it out"
            )

    def full_shape(
        self, name: str, stored: Callable[[str], tuple[list[int], int]], read: Callable[[str], Tensor]
    ) -> list[int]:
        return read(f"{name}_shape").tolist()

    def _quantize(self, module: str, weight: Tensor) -> list[tuple[str, Tensor]]:
        parts = int4.quantize_groups(weight, self._group_size)
        endings = ("weight_packed", "weight_scale", "weight_shape")
        return [(f"{module}.{ending}", part) for ending, part in zip(endings, parts, strict=True)]

    def dequantize(self, name: str, read: Callable[[str], Tensor], names: Collection[str]) -> Tensor:
        zero_point = read(f"{name}_zero_point") if f"{name}_zero_point" in names else None
        return int4.dequantize(read(f"{name}_packed"), read(f"{name}_scale"), read(f"{name}_shape"), zero_point)
