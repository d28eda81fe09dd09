"""The weight tables' arithmetic: layouts' operations are inverses, and values land where Megatron expects them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.backends.megatron_utils.families import FAMILIES, ModelShape, get_family
from slime.backends.megatron_utils.families.layout import (
    COLUMN_PARALLEL,
    GATE_UP_PARALLEL,
    QKV_PARALLEL,
    REPLICATED,
    ROW_PARALLEL,
    pad_rows,
)
from slime.backends.megatron_utils.update_weight.hf_weight_iterator import ParamInfo, _natural_order, pack_buckets


def shape(heads: int = 4, groups: int = 2, head_dim: int = 2, vocab_size: int = 6) -> ModelShape:
    return ModelShape(3, heads, groups, head_dim, vocab_size, num_experts=4, tied_embeddings=False)


def test_qkv_interleaves_groups() -> None:
    """Two groups of two heads of one row each: q0 q1 k0 v0 | q2 q3 k1 v1."""
    q, k, v = torch.tensor([0.0, 1, 2, 3]), torch.tensor([10.0, 11]), torch.tensor([20.0, 21])
    merged = QKV_PARALLEL.merge([q, k, v], shape(head_dim=1))
    assert merged.tolist() == [0, 1, 10, 20, 2, 3, 11, 21]


def test_gate_up_shards_hold_both_halves() -> None:
    gate, up = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]])
    full = GATE_UP_PARALLEL.merge([gate, up], shape())
    assert GATE_UP_PARALLEL.shard(full, 0, 2).flatten().tolist() == [1, 3]
    assert GATE_UP_PARALLEL.shard(full, 1, 2).flatten().tolist() == [2, 4]


@settings(max_examples=50, deadline=None)
@given(
    groups=st.sampled_from([2, 4]),
    per_group=st.integers(1, 3),
    head_dim=st.integers(1, 3),
    tp=st.sampled_from([1, 2]),
    bias=st.booleans(),
)
def test_qkv_round_trip(groups: int, per_group: int, head_dim: int, tp: int, bias: bool) -> None:
    sizes = shape(groups * per_group, groups, head_dim)
    trailing = () if bias else (5,)
    rows = [groups * per_group * head_dim, groups * head_dim, groups * head_dim]
    parts = [torch.randn(count, *trailing) for count in rows]
    full = QKV_PARALLEL.merge(parts, sizes)
    shards = [QKV_PARALLEL.shard(full, rank, tp) for rank in range(tp)]
    back = QKV_PARALLEL.split(QKV_PARALLEL.gather(shards), sizes)
    assert all(torch.equal(before, after) for before, after in zip(parts, back, strict=True))


@pytest.mark.parametrize("layout", [REPLICATED, COLUMN_PARALLEL, ROW_PARALLEL, GATE_UP_PARALLEL])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_shard_and_gather_are_inverse(layout: object, tp: int) -> None:
    full = torch.randn(8, 4)
    assert torch.equal(layout.gather([layout.shard(full, rank, tp) for rank in range(tp)]), full)


def test_uneven_shards_are_refused() -> None:
    with pytest.raises(ValueError, match=r"dimension 0 of shape \(6, 2\) can't be divided over 4 ranks"):
        COLUMN_PARALLEL.shard(torch.zeros(6, 2), 0, 4)


def test_vocabulary_padding() -> None:
    embedding = get_family("qwen3").bind("embedding.word_embeddings.weight")
    rows = torch.randn(6, 3)
    padded = embedding.to_megatron([rows], shape(), padded_rows=8)
    assert padded.shape == (8, 3) and not padded[6:].any()
    ((name, back),) = embedding.to_hf(padded, shape())
    assert name == "model.embed_tokens.weight" and torch.equal(back, rows)
    with pytest.raises(ValueError, match="6 rows, the model has room for 4"):
        pad_rows(rows, 4)


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_each_row_binds_under_all_its_names(model_type: str) -> None:
    """A name leads to exactly one row: no pattern shadows another."""
    family = FAMILIES[model_type]
    for row in family.weights:
        for name in row.megatron_names:
            bound = family.bind(name.format(layer=12, expert=3, mtp=1), num_layers=40)
            assert bound.row is row
            assert all("{" not in hf_name for hf_name in bound.hf_names)
            assert bound.is_expert == ("{expert}" in name)


def test_mtp_layers_are_numbered_on() -> None:
    family = get_family("deepseek_v3")
    bound = family.bind("mtp.layers.0.transformer_layer.mlp.experts.local_experts.7.linear_fc2.weight", num_layers=61)
    assert bound.hf_names == ("model.layers.61.mlp.experts.7.down_proj.weight",) and bound.is_expert
    assert family.bind("mtp.layers.1.enorm.weight", 61).hf_names == ("model.layers.62.enorm.weight",)
    assert family.is_mtp("model.layers.61.embed_tokens.weight", 61)
    assert not family.is_mtp("model.layers.60.mlp.gate.weight", 61)
    assert not get_family("qwen3").is_mtp("model.layers.61.mlp.gate.weight", 61)


def test_unknown_names_say_what_is_known() -> None:
    with pytest.raises(KeyError, match=r"qwen3.*decoder\.layers\.0\.mlp\.mystery"):
        get_family("qwen3").bind("decoder.layers.0.mlp.mystery")
    with pytest.raises(ValueError, match=r"'bloom'.*llama, .*qwen2, "):
        get_family("bloom")


def _info(name: str, size: int) -> ParamInfo:
    return ParamInfo(name, (size,), torch.uint8, pipeline_rank=0, expert_rank=None, full_bytes=size)


def test_buckets_keep_order_and_limit() -> None:
    infos = [_info(str(index), size) for index, size in enumerate([4, 4, 4, 20, 3, 7])]
    assert [[info.full_bytes for info in bucket] for bucket in pack_buckets(infos, 10)] == [[4, 4], [4], [20], [3, 7]]
    assert pack_buckets([], 10) == []


def test_layers_are_ordered_as_numbers() -> None:
    names = ["decoder.layers.10.a", "output_layer.weight", "decoder.layers.9.b", "decoder.final", "decoder.layers.9.a"]
    assert sorted(names, key=_natural_order) == [
        "decoder.final",
        "decoder.layers.9.a",
        "decoder.layers.9.b",
        "decoder.layers.10.a",
        "output_layer.weight",
    ]
