"""Adapters of what only accelerators build (grouped experts, norms fused with a linear layer), and of one base."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from slime.backends.megatron_utils.families import ModelShape
from slime.backends.megatron_utils.families.layout import GATE_UP_PARALLEL, QKV_PARALLEL
from slime.backends.megatron_utils.lora.adapter import GroupedLinearAdapter, LinearAdapter, fused_norm
from slime.backends.megatron_utils.lora.identity import fingerprint
from slime.backends.megatron_utils.lora.parallel import Cut

SHAPE = ModelShape(2, 4, 2, 8, 64, 3, False)
ALONE = Cut(column=True, expert=True, sequence_parallel=False, rank=0, size=1)


def adapter(names: list[str | None], weight: Tensor, layout: object = GATE_UP_PARALLEL) -> LinearAdapter:
    made = LinearAdapter(names, layout, SHAPE, weight, ALONE, rank=3, alpha=6.0, seed=1)  # type: ignore[arg-type]
    with torch.no_grad():
        for pair in made.pairs.values():
            pair.lora_B.copy_(torch.randn(pair.lora_B.shape))  # type: ignore[union-attr, operator]
    return made


def tensors_of(made: LinearAdapter) -> dict[str, Tensor]:
    return {entry.name: entry.parameter.detach() for pair in made._pairs() for entry in pair.named()}


@pytest.mark.parametrize("left_out", [None, 0, 1, 2])
def test_what_is_added_is_what_is_merged(left_out: int | None) -> None:
    """Fused q, k and v, all or two of them: 2 · B A in the order of the fused rows."""
    torch.manual_seed(0)
    names: list[str | None] = [None if i == left_out else f"layer.{x}_proj" for i, x in enumerate("qkv")]
    weight = torch.randn((4 + 2 * 2) * 8, 12)
    made = adapter(names, weight, QKV_PARALLEL)
    inputs = torch.randn(5, 1, 12)
    delta = made.delta(tensors_of(made))
    torch.testing.assert_close(made(inputs), inputs @ delta.T)
    parts = QKV_PARALLEL.split(delta, SHAPE)
    for index, (name, part) in enumerate(zip(names, parts, strict=True)):
        if name is None:
            assert (part == 0).all()
        else:
            pair = made.pairs["qkv"[index] + "_proj"]
            torch.testing.assert_close(part, 2.0 * pair.lora_B @ pair.lora_A)  # type: ignore[union-attr, operator]


def test_grouped_experts() -> None:
    """Each expert's tokens by its own adapter; an expert without tokens; counts as a list or a tensor."""
    torch.manual_seed(0)
    experts = [adapter([f"experts.{i}.gate_proj", f"experts.{i}.up_proj"], torch.randn(10, 6)) for i in range(3)]
    grouped, inputs = GroupedLinearAdapter(experts), torch.randn(7, 6)
    expected = torch.cat([experts[0](inputs[:4]), experts[2](inputs[4:])])
    for counts in ([4, 0, 3], torch.tensor([4, 0, 3])):
        torch.testing.assert_close(grouped(inputs, counts), expected)
    grouped(inputs, [4, 0, 3]).sum().backward()
    assert all(parameter.grad is not None for parameter in grouped.parameters()), "DDP waits for every gradient"


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_a_fused_norm_is_computed_again(kind: str, zero_centered: bool) -> None:
    torch.manual_seed(0)
    module = torch.nn.Module()
    module.layer_norm_weight = torch.nn.Parameter(torch.randn(8))
    module.layer_norm_bias = torch.nn.Parameter(torch.randn(8))
    inputs = torch.randn(3, 8)
    weight = module.layer_norm_weight + zero_centered
    if kind == "RMSNorm":
        expected = inputs / (inputs.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    else:
        expected = F.layer_norm(inputs, (8,), weight, module.layer_norm_bias, 1e-5)
    torch.testing.assert_close(fused_norm(module, kind, 1e-5, zero_centered)(inputs), expected)


def test_an_unknown_fused_norm_is_refused() -> None:
    with pytest.raises(ValueError, match="'L2Norm'"):
        fused_norm(torch.nn.Module(), "L2Norm", 1e-5, False)


def test_fingerprint_tells_weights_apart_and_not_places(tmp_path: Path) -> None:
    """Equal weights elsewhere, in other files, are the same base; one changed number is another."""
    tensors = {name: torch.randn(6, 5) for name in ("a", "b", "c")}
    for name in ("one", "two", "changed"):
        (tmp_path / name).mkdir()
    save_file(tensors, tmp_path / "one" / "model.safetensors")
    save_file({"a": tensors["a"]}, tmp_path / "two" / "model-1.safetensors")
    save_file({"b": tensors["b"], "c": tensors["c"]}, tmp_path / "two" / "model-2.safetensors")
    (tmp_path / "two" / "extra.json").write_text(json.dumps({}))
    changed = {**tensors, "b": tensors["b"] + 1e-3}
    save_file(changed, tmp_path / "changed" / "model.safetensors")
    one, two, other = (fingerprint(str(tmp_path / name)) for name in ("one", "two", "changed"))
    assert one == two != other and len(one) == 12
