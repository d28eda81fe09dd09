"""Adapters of one linear layer: low-rank pairs, one per Hugging Face module that the layer is made of."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from slime.backends.megatron_utils.families import ModelShape
from slime.backends.megatron_utils.families.layout import Layout
from slime.backends.megatron_utils.lora.parallel import Cut

Tensors = Mapping[str, Tensor]


@dataclasses.dataclass(frozen=True)
class AdapterParameter:
    """One trained matrix.

    Attributes:
        name: unique over the model: its Hugging Face module and `lora_A` or `lora_B`.
        dim: the dimension along which ranks share it; None: whole on each.
        sections: sizes along `dim`, on this rank, of what is cut by itself: gate and up in one matrix are two.
    """

    name: str
    parameter: torch.nn.Parameter
    dim: int | None
    cut: Cut
    sections: tuple[int, ...]

    def shard(self, full: Tensor) -> Tensor:
        """This rank's part of the whole matrix; ValueError where it can't be divided."""
        return self.cut.shard(full, self.dim, self.sections)

    def gather(self, shard: Tensor) -> Tensor:
        """The whole matrix; all ranks that share it take part."""
        return self.cut.gather(shard, self.dim, self.sections)


class LowRankPair(torch.nn.Module):
    """A [rank, inputs] and B [outputs, rank] of one Hugging Face module; this rank's parts.

    A is uniform in ±1/sqrt(inputs) as PEFT draws it, from a generator of its own, so that it does not depend on the
    layout; B is 0, so that a new adapter changes nothing.
    """

    def __init__(
        self,
        hf_name: str,
        inputs: int,
        outputs: tuple[int, ...],
        rank: int,
        cut: Cut,
        base: Tensor,
        seed: int,
    ) -> None:
        """`inputs`: of the whole layer; `outputs`: sections of this rank's part; `base`: the layer's weight."""
        super().__init__()
        self.hf_name, self.cut = hf_name, cut
        piece = rank // cut.rank_shards
        self._down_sections = (piece if cut.down_dim == 0 else inputs // cut.size,)
        self._up_sections = (piece,) if cut.up_dim == 1 else outputs
        down = cut.shard(_draw(f"{seed} {hf_name}", rank, inputs), cut.down_dim, self._down_sections)
        columns = piece if cut.up_dim == 1 else rank
        self.lora_A = torch.nn.Parameter(down.to(device=base.device, dtype=base.dtype).contiguous())
        self.lora_B = torch.nn.Parameter(base.new_zeros(sum(outputs), columns))
        cut.mark(self.lora_A, cut.down_dim, base)
        cut.mark(self.lora_B, cut.up_dim, base)

    def forward(self) -> tuple[Tensor, Tensor]:
        """A and B. Called, not read, because a module's call waits for parameters that are still being gathered."""
        return self.lora_A, self.lora_B

    def named(self) -> Iterator[AdapterParameter]:
        cut = self.cut
        yield AdapterParameter(f"{self.hf_name}.lora_A", self.lora_A, cut.down_dim, cut, self._down_sections)
        yield AdapterParameter(f"{self.hf_name}.lora_B", self.lora_B, cut.up_dim, cut, self._up_sections)

    def product(self, tensors: Tensors) -> Tensor:
        """This rank's part of B A in float32, from the parts in `tensors`; experts' ranks exchange theirs."""
        of_a, of_b = self.named()
        down, up = (tensors[entry.name].to(self.lora_A.device) for entry in (of_a, of_b))
        if of_a.dim == 0:  # the inner dimension is cut: both must have all of it
            down = of_a.gather(down)
        if of_b.dim == 1:
            up = of_b.gather(up)
        return up.float() @ down.float()


class LinearAdapter(torch.nn.Module):
    """The adapters of one linear layer, whose weight is `layout.merge` of Hugging Face modules.

    Args:
        hf_names: of those modules, in the layout's order; None for one without an adapter.
        shape: the model's sizes.
        weight: this rank's weight [outputs, inputs] of the layer.
    """

    def __init__(
        self,
        hf_names: Sequence[str | None],
        layout: Layout,
        shape: ModelShape,
        weight: Tensor,
        cut: Cut,
        *,
        rank: int,
        alpha: float,
        seed: int,
    ) -> None:
        super().__init__()
        if cut.expert and rank % cut.size:
            raise ValueError(f"--lora-rank {rank} must be a multiple of --expert-tensor-parallel-size {cut.size}")
        self._layout, self._cut, self._rank, self._scaling = layout, cut, rank, alpha / rank
        self._shape = _shape_of_rank(shape, cut.size)
        parts = layout.split(torch.empty(weight.shape, device="meta"), self._shape)
        self._outputs = [part.shape[0] for part in parts]
        inputs = weight.shape[1] * (1 if cut.column else cut.size)
        self._names = [None if name is None else name.rpartition(".")[2] for name in hf_names]
        self.pairs = torch.nn.ModuleDict()
        for index, (hf_name, name) in enumerate(zip(hf_names, self._names, strict=True)):
            if hf_name is not None and name is not None:
                sections = layout.sections(index, self._outputs[index], self._shape)
                self.pairs[name] = LowRankPair(hf_name, inputs, sections, rank, cut, weight, seed)

    def forward(self, inputs: Tensor) -> Tensor:
        """What the adapters add to the layer's output on this rank: [..., inputs] -> [..., outputs].

        All pairs in two products: their A one above the other, their B side by side, laid out as the layer's weight.
        """
        matrices = [pair() for pair in self._pairs()]
        down = torch.cat([lora_a for lora_a, _ in matrices])
        hidden = self._cut.between(F.linear(inputs.to(down.dtype), down))
        return F.linear(hidden * self._scaling, self._up([lora_b for _, lora_b in matrices]))

    def delta(self, tensors: Tensors) -> Tensor:
        """alpha / rank · B A in float32, laid out as this rank's weight. `tensors`: this rank's A and B by name."""
        products = (pair.product(tensors) for pair in self._pairs())
        some = next(self.parameters())  # an A
        columns, device = some.shape[1], some.device
        blocks = [
            torch.zeros(outputs, columns, device=device) if name is None else next(products)
            for name, outputs in zip(self._names, self._outputs, strict=True)
        ]
        return self._layout.merge(blocks, self._shape) * self._scaling

    def _up(self, matrices: list[Tensor]) -> Tensor:
        """The B of all pairs as [outputs, pairs · rank]. What `between` gives has its columns by piece of the rank,
        then pair."""
        pieces = self._cut.rank_shards if self._cut.column else 1
        remaining = iter(enumerate(matrices))
        blocks = []
        for name, outputs in zip(self._names, self._outputs, strict=True):
            if name is None:
                blocks.append(matrices[0].new_zeros(outputs, len(matrices) * matrices[0].shape[1]))
                continue
            before, up = next(remaining)
            spread = F.pad(up.view(outputs, pieces, 1, -1), (0, 0, before, len(matrices) - 1 - before))
            blocks.append(spread.reshape(outputs, -1))
        return self._layout.merge(blocks, self._shape)

    def _pairs(self) -> Iterator[LowRankPair]:
        for pair in self.pairs.values():
            assert isinstance(pair, LowRankPair)
            yield pair


class GroupedLinearAdapter(torch.nn.Module):
    """The adapters of a linear layer that holds several experts and takes their tokens one after another."""

    def __init__(self, experts: Sequence[LinearAdapter]) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList(experts)

    def forward(self, inputs: Tensor, tokens_per_expert: Sequence[int] | Tensor) -> Tensor:
        counts = tokens_per_expert.tolist() if isinstance(tokens_per_expert, Tensor) else list(tokens_per_expert)
        pieces = inputs.split(counts)
        return torch.cat([expert(piece) for expert, piece in zip(self.experts, pieces, strict=True)])


def fused_norm(module: torch.nn.Module, normalization: str, eps: float, zero_centered: bool) -> Callable[..., Tensor]:
    """The norm that a fused norm-and-linear module (Transformer Engine) applies before its product, computed again.

    Raises:
        ValueError: a normalization that is neither RMSNorm nor LayerNorm.
    """
    if normalization not in ("RMSNorm", "LayerNorm"):
        raise ValueError(f"adapters can't follow the fused norm {normalization!r}")

    def norm(inputs: Tensor) -> Tensor:
        wide = inputs.float()
        weight = module.layer_norm_weight.float() + (1.0 if zero_centered else 0.0)
        if normalization == "RMSNorm":
            out = F.rms_norm(wide, wide.shape[-1:], weight, eps)
        else:
            out = F.layer_norm(wide, wide.shape[-1:], weight, module.layer_norm_bias.float(), eps)
        return out.to(inputs.dtype)

    return norm


def _shape_of_rank(shape: ModelShape, size: int) -> ModelShape:
    """The sizes of what one of `size` ranks holds."""
    linear = shape.linear_heads
    return dataclasses.replace(
        shape,
        num_attention_heads=shape.num_attention_heads // size,
        num_query_groups=shape.num_query_groups // size,
        linear_heads=linear and dataclasses.replace(linear, keys=linear.keys // size, values=linear.values // size),
    )


def _draw(key: str, rows: int, columns: int) -> Tensor:
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "big")
    drawn = torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed))
    return (2 * drawn - 1) / math.sqrt(columns)
