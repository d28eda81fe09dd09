"""The table that describes a model family: one row per kind of weight, read in both directions."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence

import torch
from torch import Tensor

from slime.backends.megatron_utils.families.layout import REPLICATED, Layout, ModelShape, pad_rows

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"


@dataclasses.dataclass(frozen=True)
class Weight:
    """One row: a Megatron weight, the Hugging Face tensors it is made of, and how.

    Names are global (layers and experts counted over the whole model) and may hold `{layer}`, `{expert}` and `{mtp}`
    (number of a multi-token-prediction layer); Hugging Face names also `{mtp_layer}`, the same number counted on after
    the last layer. The first Megatron name is the one of Megatron's local layer spec; others are those of specs that
    fuse or group modules (Transformer Engine). `vocab_rows` marks matrices with a row per token, which Megatron pads;
    `stacked_experts`, Hugging Face tensors that hold all experts of a layer along their first dimension.
    """

    megatron: tuple[str, ...] | str
    hf: tuple[str, ...] | str
    layout: Layout = REPLICATED
    vocab_rows: bool = False
    stacked_experts: bool = False

    @property
    def megatron_names(self) -> tuple[str, ...]:
        return (self.megatron,) if isinstance(self.megatron, str) else self.megatron

    @property
    def hf_names(self) -> tuple[str, ...]:
        return (self.hf,) if isinstance(self.hf, str) else self.hf


@dataclasses.dataclass(frozen=True)
class BoundWeight:
    """A row applied to one weight of a model: its layer and expert are filled in."""

    row: Weight
    hf_names: tuple[str, ...]
    expert: int | None = None

    @property
    def is_expert(self) -> bool:
        return self.expert is not None

    def to_megatron(self, parts: Sequence[Tensor], shape: ModelShape, padded_rows: int | None = None) -> Tensor:
        """The full Megatron tensor.

        Args:
            parts: the Hugging Face tensors; of those that stack experts, this expert's part.
            padded_rows: the padded vocabulary size, for weights with vocabulary rows.
        """
        full = self.row.layout.merge(parts, shape)
        return pad_rows(full, padded_rows) if self.row.vocab_rows and padded_rows is not None else full

    def to_hf(self, full: Tensor, shape: ModelShape) -> list[tuple[str, Tensor]]:
        """The named Hugging Face tensors, contiguous, without padding rows; this expert's part of stacked ones."""
        if self.row.vocab_rows:
            full = full[: shape.vocab_size]
        parts = self.row.layout.split(full, shape)
        return [(name, part.contiguous()) for name, part in zip(self.hf_names, parts, strict=True)]


@dataclasses.dataclass(frozen=True)
class Family:
    """A model family: its Hugging Face `model_type`s, its table, and regexes of tensors that carry no weight.

    `mtp_hf` matches the tensors of multi-token-prediction layers; its group `layer`, if it has one, counts on after
    the last layer. `kept_hf` match tensors that the trainer does not hold (a vision tower): engines keep theirs, and
    an export copies those of `--hf-checkpoint`. `stacked` is the family whose directories have a layer's experts in
    one tensor, where there are both kinds.
    """

    model_types: tuple[str, ...]
    weights: tuple[Weight, ...]
    unused_hf: tuple[str, ...] = (r"rotary_emb\.inv_freq$",)
    mtp_hf: str | None = None
    kept_hf: tuple[str, ...] = ()
    stacked: Family | None = None

    @functools.cached_property
    def _patterns(self) -> tuple[tuple[re.Pattern[str], Weight], ...]:
        return tuple((_compile(name), row) for row in self.weights for name in row.megatron_names)

    def bind(self, megatron_name: str, num_layers: int | None = None) -> BoundWeight:
        """The row of a weight with this global Megatron name.

        Args:
            num_layers: of the model; some families need it to name multi-token-prediction layers.

        Raises:
            KeyError: the table has no such weight; the message names it and the family.
        """
        for pattern, row in self._patterns:
            match = pattern.fullmatch(megatron_name)
            if match:
                fields: dict[str, object] = dict(match.groupdict())
                if "mtp" in fields and num_layers is not None:
                    fields["mtp_layer"] = int(match["mtp"]) + num_layers
                expert = int(match["expert"]) if "expert" in fields else None
                return BoundWeight(row, tuple(name.format(**fields) for name in row.hf_names), expert)
        raise KeyError(
            f"the table of {'/'.join(self.model_types)} has no row for the Megatron weight {megatron_name!r}"
        )

    def is_unused(self, hf_name: str) -> bool:
        return any(re.search(pattern, hf_name) for pattern in self.unused_hf)

    def is_mtp(self, hf_name: str, num_layers: int) -> bool:
        """Whether the tensor belongs to a multi-token-prediction layer of a model with `num_layers` others."""
        match = re.match(self.mtp_hf, hf_name) if self.mtp_hf else None
        return match is not None and int(match.groupdict().get("layer", num_layers)) >= num_layers

    def is_kept(self, hf_name: str, num_layers: int) -> bool:
        """Whether a model that does not hold the tensor is whole without it: exports copy it, loading passes it by."""
        return self.is_mtp(hf_name, num_layers) or any(re.match(pattern, hf_name) for pattern in self.kept_hf)


class ExpertStacks:
    """Puts the parts that `BoundWeight.to_hf` gives of stacked tensors together; others pass."""

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts
        self._parts: dict[str, dict[int, Tensor]] = {}

    def add(self, bound: BoundWeight, named: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """The tensors that are complete now."""
        if not bound.row.stacked_experts or bound.expert is None:
            return list(named)
        complete = []
        for name, part in named:
            parts = self._parts.setdefault(name, {})
            parts[bound.expert] = part
            if len(parts) == self._num_experts:
                complete.append((name, torch.stack([parts[i] for i in range(self._num_experts)])))
                del self._parts[name]
        return complete

    def check_complete(self) -> None:
        """ValueError for a tensor some of whose experts did not come."""
        if self._parts:
            raise ValueError(f"experts are missing of {', '.join(sorted(self._parts))}")


def renamed(weights: tuple[Weight, ...], names: dict[str, str]) -> tuple[Weight, ...]:
    """The rows with parts of their Hugging Face names replaced, one after the other."""

    def rename(name: str) -> str:
        for old, new in names.items():
            name = name.replace(old, new)
        return name

    return tuple(dataclasses.replace(row, hf=tuple(map(rename, row.hf_names))) for row in weights)


def _compile(name: str) -> re.Pattern[str]:
    pattern = re.escape(name)
    for field in ("layer", "expert", "mtp"):
        pattern = pattern.replace(re.escape(f"{{{field}}}"), rf"(?P<{field}>\d+)")
    return re.compile(pattern)
