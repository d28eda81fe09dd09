"""FP8 and INT4 weights against plain float64 arithmetic, and against the libraries that read them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from slime.backends.megatron_utils.low_precision import fp8, int4, scheme_from_config
from slime.backends.megatron_utils.low_precision.scheme import BlockFP8, PackedINT4, TensorFP8

SHAPES = [(128, 128), (1, 1), (130, 257), (300, 96), (64, 512)]
INT4_CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*mlp\\.gate$"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
        }
    },
}


def weights(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    torch.manual_seed(rows * 1000 + columns)
    spread = torch.exp(2 * torch.randn(rows, 1))  # rows of very different size
    return (torch.randn(rows, columns) * spread).to(dtype)


def blocks_of(tensor: Tensor, block: int) -> list[tuple[int, int, Tensor]]:
    rows, columns = tensor.shape
    return [
        (row // block, column // block, tensor[row : row + block, column : column + block])
        for row in range(0, rows, block)
        for column in range(0, columns, block)
    ]


@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_block_fp8(shape: tuple[int, int], ue8m0: bool) -> None:
    """Each block's scale is its largest magnitude over 448 (or the next power of two), each value the nearest."""
    weight = weights(*shape)
    quantized, scales = fp8.quantize_blocks(weight, (128, 128), ue8m0=ue8m0)
    assert quantized.dtype == torch.float8_e4m3fn and quantized.shape == weight.shape and quantized.is_contiguous()
    assert scales.shape == (math.ceil(shape[0] / 128), math.ceil(shape[1] / 128)) and scales.dtype == torch.float32
    restored = fp8.dequantize(quantized, scales, (128, 128)).double()
    for (i, j, original), (_, _, back) in zip(blocks_of(weight.double(), 128), blocks_of(restored, 128), strict=True):
        exact = original.abs().max().item() / 448
        if ue8m0:
            exact = 2.0 ** math.ceil(math.log2(exact))
        assert scales[i, j].item() == pytest.approx(exact, rel=1e-6)
        # e4m3: 3 bits of mantissa, and steps of 2^-9 below 2^-6
        allowed = torch.maximum(original.abs() * 2**-4, torch.tensor(exact * 2**-10, dtype=torch.float64))
        assert torch.all((back - original).abs() <= allowed * (1 + 1e-5))


def test_transformers_dequantises_to_the_same_numbers() -> None:
    """Its dequantiser knows whole blocks only."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    quantized, scales = fp8.quantize_blocks(weights(256, 384), (128, 128))
    theirs = Fp8Dequantize(hf_quantizer=None)._dequantize_one(quantized, scales, torch.float32)
    assert torch.equal(theirs, fp8.dequantize(quantized, scales, (128, 128)))


@pytest.mark.parametrize("ue8m0", [False, True])
def test_a_zero_block_is_finite(ue8m0: bool) -> None:
    """C10: all-zero blocks quantise to zeros with a finite scale; so do subnormal ones."""
    weight = torch.zeros(256, 130, dtype=torch.bfloat16)
    weight[200, 5], weight[10, 129] = 3.0, 1e-40
    quantized, scales = fp8.quantize_blocks(weight, (128, 128), ue8m0=ue8m0)
    assert torch.isfinite(scales).all() and torch.isfinite(quantized.float()).all() and (scales > 0).all()
    assert fp8.dequantize(quantized, scales, (128, 128))[200, 5] == pytest.approx(3.0, rel=1e-6 if not ue8m0 else 0.07)
    zeros, scale = fp8.quantize_tensor(torch.zeros(2, 2))
    assert torch.equal(zeros.float(), torch.zeros(2, 2)) and torch.isfinite(scale).all()
    packed, group_scales, _ = int4.quantize_groups(torch.zeros(2, 32), 32)
    assert torch.equal(int4.unpack(packed, 32), torch.zeros(2, 32, dtype=torch.int32))
    assert torch.isfinite(group_scales).all()


@pytest.mark.parametrize("quantize", [lambda w: fp8.quantize_blocks(w, (128, 128)), fp8.quantize_tensor])
def test_nan_is_refused(quantize: Callable[[Tensor], Any]) -> None:
    with pytest.raises(ValueError, match="NaN"):
        quantize(torch.tensor([[1.0, float("nan")]]))


def test_tensor_fp8() -> None:
    weight = weights(130, 70)
    quantized, scale = fp8.quantize_tensor(weight)
    assert scale.shape == (1,)
    assert scale.item() == pytest.approx(weight.double().abs().max().item() / 448, rel=1e-6)
    restored = fp8.dequantize(quantized, scale, None).double()
    allowed = torch.maximum(weight.double().abs() * 2**-4, scale.double() * 2**-10)
    assert torch.all((restored - weight.double()).abs() <= allowed * (1 + 1e-5))


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_int4(group: int, dtype: torch.dtype) -> None:
    """Each value is the nearest multiple of its group's stored scale, which lets the largest be 7 of them."""
    weight = weights(13, 2 * group, dtype)
    packed, scales, shape = int4.quantize_groups(weight, group)
    assert packed.shape == (13, group // 4) and scales.shape == (13, 2) and shape.tolist() == [13, 2 * group]
    exact = weight.double().view(13, 2, group).abs().amax(-1) / 7
    torch.testing.assert_close(scales.double(), exact, rtol=torch.finfo(dtype).eps, atol=0)
    expected = (weight.double().view(13, 2, group) / scales.double()[..., None]).round().clamp(-8, 7)
    assert torch.equal(int4.unpack(packed, 2 * group).view(13, 2, group).double(), expected)
    restored = int4.dequantize(packed, scales, shape).double().view(13, 2, group)
    torch.testing.assert_close(restored, expected * scales.double()[..., None], rtol=1e-7, atol=0)


def test_int4_words_are_those_of_compressed_tensors() -> None:
    """Bit for bit, also where the columns don't fill the last word; and its own unpacking and dequantiser agree."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

    for columns in (8, 32, 20):
        values = torch.randint(-8, 8, (5, columns), dtype=torch.int8)
        words = int4.pack(values.int())
        assert torch.equal(words, pack_to_int32(values, 4))
        assert torch.equal(unpack_from_int32(words, 4, torch.Size(values.shape)).int(), values.int())
        assert torch.equal(int4.unpack(words, columns), values.int())


def test_int4_columns_must_fill_groups() -> None:
    with pytest.raises(ValueError, match=r"a\.b\.weight of shape \(4, 40\).*groups of 32"):
        PackedINT4(32).quantize("a.b.weight", torch.ones(4, 40))


@pytest.mark.parametrize(
    "scheme", [BlockFP8((128, 128)), BlockFP8((128, 128), ue8m0=True), TensorFP8(), PackedINT4(32)], ids=repr
)
def test_bits_come_back(scheme: Any) -> None:
    """Dequantised and quantised again, a weight has the same bits: export, load and export are stable."""
    first = dict(scheme.quantize("layer.weight", weights(160, 256)))
    restored = scheme.dequantize("layer.weight", first.__getitem__, first.keys())
    if isinstance(scheme, PackedINT4):
        restored = restored.to(torch.bfloat16)  # its scales have the weight's dtype
    second = dict(scheme.quantize("layer.weight", restored))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        if tensor.dtype == torch.float32:  # 448 * scale / 448 may differ in the last bit
            torch.testing.assert_close(second[name], tensor, rtol=2e-7, atol=0)
        else:
            assert torch.equal(second[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_which_weights() -> None:
    """`modules_to_not_convert` and `ignore` are followed; embeddings, norms, biases and routers stay as they are."""
    two, one = torch.ones(64, 64), torch.ones(64)
    block = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["model.layers.0.mlp"]}
    scheme = scheme_from_config(block)
    assert isinstance(scheme, BlockFP8)
    covered = {
        "model.layers.1.self_attn.q_proj.weight": (two, True),
        "model.layers.1.mlp.gate_proj.weight": (two, True),
        "model.layers.1.mlp.experts.3.down_proj.weight": (two, True),
        "model.layers.0.mlp.gate_proj.weight": (two, False),
        "model.layers.1.mlp.gate.weight": (two, False),
        "model.layers.1.self_attn.q_proj.bias": (one, False),
        "model.layers.1.input_layernorm.weight": (one, False),
        "model.embed_tokens.weight": (two, False),
        "lm_head.weight": (two, False),
    }
    assert {name: scheme.covers(name, tensor) for name, (tensor, _) in covered.items()} == {
        name: answer for name, (_, answer) in covered.items()
    }
    assert isinstance(scheme_from_config({"quant_method": "fp8"}), TensorFP8)
    packed = scheme_from_config(INT4_CONFIG)
    assert packed.covers("model.layers.0.mlp.gate_proj.weight", two)
    assert not packed.covers("model.layers.0.mlp.gate.weight", two) and not packed.covers("lm_head.weight", two)
    # What the checkpoint stores decides, whatever its list says.
    scheme.follow(["model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight_scale_inv", "x.weight"])
    assert scheme.covers("model.layers.0.mlp.up_proj.weight", two) and not scheme.covers("x.weight", two)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "awq"}, "'awq'"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "activation_scheme"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "e5m2"),
        ({**INT4_CONFIG, "format": "float-quantized"}, "pack-quantized"),
    ],
)
def test_unknown_methods_are_refused(config: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        scheme_from_config(config)
