"""How one Megatron weight relates to its Hugging Face tensors, and how tensor parallelism cuts it.

A layout is pure tensor arithmetic with two pairs of inverse operations:

* `merge` / `split`: Hugging Face tensors <-> the full (unsharded) Megatron tensor;
* `shard` / `gather`: the full Megatron tensor <-> one tensor per tensor-parallel rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


_EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")


@dataclasses.dataclass(frozen=True)
class LinearHeads:
    """Heads of linear attention: a key head serves several value heads."""

    keys: int
    values: int
    key_dim: int
    value_dim: int


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """The sizes that the conversions depend on. `vocab_size` is the tokenizer's, without padding rows."""

    num_layers: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    vocab_size: int
    num_experts: int
    tied_embeddings: bool
    linear_heads: LinearHeads | None = None

    @classmethod
    def from_config(cls, config: TransformerConfig, *, vocab_size: int, tied_embeddings: bool) -> ModelShape:
        return cls(
            num_layers=config.num_layers,
            num_attention_heads=config.num_attention_heads,
            num_query_groups=config.num_query_groups or config.num_attention_heads,
            head_dim=config.kv_channels,
            vocab_size=vocab_size,
            num_experts=config.num_moe_experts or 0,
            tied_embeddings=tied_embeddings,
            linear_heads=_linear_heads(vars(config)) if config.linear_attention_freq is not None else None,
        )

    @classmethod
    def from_hf(cls, hf_config: dict[str, Any]) -> ModelShape:
        """The same from the content of a `config.json`; a nested `text_config` is used where there is one."""
        tied = hf_config.get("tie_word_embeddings", False)
        hf_config = {"tie_word_embeddings": tied, **(hf_config.get("text_config") or hf_config)}
        heads = hf_config["num_attention_heads"]
        return cls(
            num_layers=hf_config["num_hidden_layers"],
            num_attention_heads=heads,
            num_query_groups=hf_config.get("num_key_value_heads") or heads,
            head_dim=hf_config.get("head_dim") or hf_config["hidden_size"] // heads,
            vocab_size=hf_config["vocab_size"],
            num_experts=next((hf_config[key] for key in _EXPERT_COUNTS if hf_config.get(key)), 0),
            tied_embeddings=hf_config["tie_word_embeddings"],
            linear_heads=_linear_heads(hf_config) if "linear_num_key_heads" in hf_config else None,
        )


def _linear_heads(config: dict[str, Any]) -> LinearHeads:
    return LinearHeads(
        keys=config["linear_num_key_heads"],
        values=config["linear_num_value_heads"],
        key_dim=config["linear_key_head_dim"],
        value_dim=config["linear_value_head_dim"],
    )


@dataclasses.dataclass(frozen=True)
class Layout:
    """One Hugging Face tensor, taken as it is; cut along `tp_dim` over tensor-parallel ranks (None: replicated)."""

    tp_dim: int | None = None

    def merge(self, parts: Sequence[Tensor], shape: ModelShape) -> Tensor:
        (tensor,) = parts
        return tensor

    def split(self, full: Tensor, shape: ModelShape) -> tuple[Tensor, ...]:
        return (full,)

    def shard(self, full: Tensor, rank: int, size: int) -> Tensor:
        if self.tp_dim is None or size == 1:
            return full
        return _equal_chunks(full, size, self.tp_dim)[rank]

    def gather(self, shards: Sequence[Tensor]) -> Tensor:
        if self.tp_dim is None or len(shards) == 1:
            return shards[0]
        return torch.cat(list(shards), dim=self.tp_dim)

    def sections(self, part: int, rows: int, shape: ModelShape) -> tuple[int, ...]:
        """How the `rows` rows of the Hugging Face tensor number `part` are cut over ranks: each of these sections by
        itself, one after another. `rows` and `shape` are those of the whole or of one rank."""
        return (rows,)


@dataclasses.dataclass(frozen=True)
class QKV(Layout):
    """q, k and v projections as Megatron's one matrix: per query group its query heads, then its key, then its value.

    Shapes: q `[heads * head_dim, ...]`, k and v `[groups * head_dim, ...]`, merged
    `[(heads + 2 * groups) * head_dim, ...]`; the trailing dimension is absent for biases.
    """

    tp_dim: int | None = 0

    def merge(self, parts: Sequence[Tensor], shape: ModelShape) -> Tensor:
        groups, trailing = shape.num_query_groups, parts[0].shape[1:]
        grouped = [part.reshape(groups, -1, *trailing) for part in parts]
        return torch.cat(grouped, dim=1).reshape(-1, *trailing)

    def split(self, full: Tensor, shape: ModelShape) -> tuple[Tensor, ...]:
        groups, trailing = shape.num_query_groups, full.shape[1:]
        queries = shape.num_attention_heads // groups * shape.head_dim
        grouped = full.reshape(groups, queries + 2 * shape.head_dim, *trailing)
        parts = grouped.split([queries, shape.head_dim, shape.head_dim], dim=1)
        return tuple(part.reshape(-1, *trailing) for part in parts)


@dataclasses.dataclass(frozen=True)
class GateUp(Layout):
    """gate and up projections stacked; every tensor-parallel rank holds its slice of gate above its slice of up."""

    tp_dim: int | None = 0

    def merge(self, parts: Sequence[Tensor], shape: ModelShape) -> Tensor:
        return torch.cat(list(parts))

    def split(self, full: Tensor, shape: ModelShape) -> tuple[Tensor, ...]:
        return full.chunk(2)

    def shard(self, full: Tensor, rank: int, size: int) -> Tensor:
        return torch.cat([_equal_chunks(half, size, 0)[rank] for half in full.chunk(2)]) if size > 1 else full

    def gather(self, shards: Sequence[Tensor]) -> Tensor:
        halves = [shard.chunk(2) for shard in shards]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves]) if len(shards) > 1 else shards[0]


@dataclasses.dataclass(frozen=True)
class FusedGateUp(GateUp):
    """The same, of a checkpoint that already holds gate above up in one tensor."""

    def merge(self, parts: Sequence[Tensor], shape: ModelShape) -> Tensor:
        (tensor,) = parts
        return tensor

    def split(self, full: Tensor, shape: ModelShape) -> tuple[Tensor, ...]:
        return (full,)

    def sections(self, part: int, rows: int, shape: ModelShape) -> tuple[int, ...]:
        return (rows // 2, rows // 2)


@dataclasses.dataclass(frozen=True)
class SwappedHalves(Layout):
    """A matrix over two joined inputs that Hugging Face joins the other way round: its halves of columns swap."""

    tp_dim: int | None = 0

    def merge(self, parts: Sequence[Tensor], shape: ModelShape) -> Tensor:
        (tensor,) = parts
        return torch.cat(tensor.chunk(2, dim=1)[::-1], dim=1)

    def split(self, full: Tensor, shape: ModelShape) -> tuple[Tensor, ...]:
        return (torch.cat(full.chunk(2, dim=1)[::-1], dim=1),)


REPLICATED = Layout()
COLUMN_PARALLEL = Layout(tp_dim=0)
ROW_PARALLEL = Layout(tp_dim=1)
QKV_PARALLEL = QKV()
GATE_UP_PARALLEL = GateUp()
FUSED_GATE_UP_PARALLEL = FusedGateUp()


def _equal_chunks(tensor: Tensor, count: int, dim: int) -> Sequence[Tensor]:
    if tensor.shape[dim] % count:
        raise ValueError(f"dimension {dim} of shape {tuple(tensor.shape)} can't be divided over {count} ranks")
    return tensor.chunk(count, dim=dim)


def pad_rows(tensor: Tensor, rows: int) -> Tensor:
    """`tensor` with zero rows appended up to `rows`."""
    missing = rows - tensor.shape[0]
    if missing < 0:
        raise ValueError(f"the vocabulary has {tensor.shape[0]} rows, the model has room for {rows}")
    return tensor if missing == 0 else torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])


def shape_from_model(args: Any, config: TransformerConfig) -> ModelShape:
    return ModelShape.from_config(
        config, vocab_size=args.vocab_size, tied_embeddings=not args.untie_embeddings_and_output_weights
    )
