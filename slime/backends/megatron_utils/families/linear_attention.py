"""Layouts of gated attention and gated delta net layers (Qwen3-Next, Qwen3.5)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from slime.backends.megatron_utils.families.layout import Layout, ModelShape


@dataclasses.dataclass(frozen=True)
class GatedQKV(Layout):
    """Megatron's one matrix of gated attention: per query group its queries, their output gates, its key, its value.

    Hugging Face's q projection holds each head's query followed by its gate: `[heads * 2 * head_dim, ...]`.
    """

    tp_dim: int | None = 0

    def merge(self, parts: Sequence[Tensor], shape: ModelShape) -> Tensor:
        groups, trailing = shape.num_query_groups, parts[0].shape[1:]
        heads = parts[0].reshape(groups, -1, 2, shape.head_dim, *trailing)
        queries = heads.transpose(1, 2).reshape(groups, -1, *trailing)
        keys_values = [part.reshape(groups, -1, *trailing) for part in parts[1:]]
        return torch.cat([queries, *keys_values], dim=1).reshape(-1, *trailing)

    def split(self, full: Tensor, shape: ModelShape) -> tuple[Tensor, ...]:
        groups, size, trailing = shape.num_query_groups, shape.head_dim, full.shape[1:]
        queries = 2 * shape.num_attention_heads // groups * size
        parts = full.reshape(groups, queries + 2 * size, *trailing).split([queries, size, size], dim=1)
        heads = parts[0].reshape(groups, 2, -1, size, *trailing).transpose(1, 2)
        return tuple(part.reshape(-1, *trailing) for part in (heads, *parts[1:]))


@dataclasses.dataclass(frozen=True)
class KeyHeads(Layout):
    """Rows of a gated delta net, which Megatron's matrix has grouped by key head.

    `tensors` has a letter for each part of each Hugging Face tensor, in order: q, k, v (query, key, values), z (output
    gates), b (write gates), a (decays). `stacked`: a part of all heads precedes the next part; otherwise a tensor
    is grouped by key head, too.
    """

    tensors: tuple[str, ...] = ()
    stacked: bool = True
    tp_dim: int | None = 0

    def merge(self, parts: Sequence[Tensor], shape: ModelShape) -> Tensor:
        rows, trailing = _rows_per_key_head(shape), parts[0].shape[1:]
        keys = _key_heads(shape)
        pieces = []
        for letters, part in zip(self.tensors, parts, strict=True):
            sections = part.split([keys * rows[x] for x in letters]) if self.stacked else [part]
            pieces += [section.reshape(keys, -1, *trailing) for section in sections]
        return torch.cat(pieces, dim=1).reshape(-1, *trailing)

    def split(self, full: Tensor, shape: ModelShape) -> tuple[Tensor, ...]:
        rows, trailing = _rows_per_key_head(shape), full.shape[1:]
        grouped = full.reshape(_key_heads(shape), -1, *trailing)
        pieces = iter(grouped.split([rows[x] for letters in self.tensors for x in letters], dim=1))
        parts = []
        for letters in self.tensors:
            own = [next(pieces) for _ in letters]
            if self.stacked:
                parts.append(torch.cat([piece.reshape(-1, *trailing) for piece in own]))
            else:
                parts.append(torch.cat(own, dim=1).reshape(-1, *trailing))
        return tuple(parts)

    def sections(self, part: int, rows: int, shape: ModelShape) -> tuple[int, ...]:
        if not self.stacked:
            return (rows,)
        per_head = _rows_per_key_head(shape)
        return tuple(_key_heads(shape) * per_head[letter] for letter in self.tensors[part])


def _key_heads(shape: ModelShape) -> int:
    assert shape.linear_heads is not None, "the model has no linear attention"
    return shape.linear_heads.keys


def _rows_per_key_head(shape: ModelShape) -> dict[str, int]:
    assert shape.linear_heads is not None, "the model has no linear attention"
    heads = shape.linear_heads
    values = heads.values // heads.keys
    wide = values * heads.value_dim
    return {"q": heads.key_dim, "k": heads.key_dim, "v": wide, "z": wide, "b": values, "a": values}


GATED_QKV_PARALLEL = GatedQKV()
