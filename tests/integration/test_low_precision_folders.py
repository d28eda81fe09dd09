"""Folders in FP8 and INT4: the tools that write them, the libraries that read them, and training on them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import low_precision_scenarios
import pytest
import torch
from safetensors.torch import load_file
from tiny_hf import make_model

from slime.backends.megatron_utils.hf_to_megatron.dequantizing_reader import open_weights
from tests.support.gloo_world import GlooWorld

REPOSITORY = Path(__file__).parents[2]
KINDS = {
    "block": ("convert_hf_to_fp8.py",),
    "ue8m0": ("convert_hf_to_fp8.py", "--scale-fmt", "ue8m0"),
    "tensor": ("convert_hf_to_fp8.py", "--strategy", "tensor"),
    "int4": ("convert_hf_to_int4.py", "--ignore", "re:.*self_attn.*"),
}


def run_tool(name: str, *words: object) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, str(REPOSITORY / "tools" / name), *map(str, words)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model in full precision, of sizes that are no multiples of 128, and in each kind of low precision."""
    root = tmp_path_factory.mktemp("low")
    make_model("qwen3", root / "full", sharded=True, hidden_size=96, intermediate_size=160)
    for kind, (tool, *words) in KINDS.items():
        module = low_precision_scenarios.tool_module(tool)
        low_precision_scenarios.call_tool(module, "--model-dir", root / "full", "--save-dir", root / kind, *words)
    return root


def test_tool_by_command_line(folders: Path, tmp_path: Path) -> None:
    """A dry run writes nothing and says how much it would write; a folder that exists is not overwritten."""
    words = ("--model-dir", folders / "full", "--save-dir", tmp_path / "fp8")
    assert "28 weights change their precision" in run_tool("convert_hf_to_fp8.py", *words, "--dry-run")
    assert not (tmp_path / "fp8").exists()
    module = low_precision_scenarios.tool_module("convert_hf_to_fp8.py")
    with pytest.raises(SystemExit, match="exists"):
        low_precision_scenarios.call_tool(module, "--model-dir", folders / "full", "--save-dir", folders / "block")
    with pytest.raises(ValueError, match=r"down_proj.*groups of 128"):
        module = low_precision_scenarios.tool_module("convert_hf_to_int4.py")
        low_precision_scenarios.call_tool(module, *words, "--group-size", "128")


@pytest.mark.parametrize("kind", KINDS)
def test_config_and_names(folders: Path, kind: str) -> None:
    config = json.loads((folders / kind / "config.json").read_text())["quantization_config"]
    names = set(open_weights(folders / kind)._file_of)
    layer = "model.layers.0.mlp.gate_proj.weight"
    expected = {
        "block": {layer, f"{layer}_scale_inv"},
        "ue8m0": {layer, f"{layer}_scale_inv"},
        "tensor": {layer, f"{layer}_scale"},
        "int4": {f"{layer}_packed", f"{layer}_scale", f"{layer}_shape"},
    }
    assert {name for name in names if name.startswith(layer)} == expected[kind]
    assert "lm_head" in config.get("modules_to_not_convert", config.get("ignore"))
    assert open_weights(folders / kind).names == open_weights(folders / "full").names
    assert (folders / kind / "tokenizer_config.json").is_file()


def test_transformers_reads_int4(folders: Path) -> None:
    """transformers, through compressed-tensors' own dequantiser, has the weights that our reader gives."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.quantization_config import CompressedTensorsConfig

    config = CompressedTensorsConfig(run_compressed=False)
    model = AutoModelForCausalLM.from_pretrained(folders / "int4", quantization_config=config, dtype=torch.float32)
    theirs, reader = model.state_dict(), open_weights(folders / "int4")
    assert set(theirs) >= reader.names
    for name in reader.names:
        torch.testing.assert_close(theirs[name].float(), reader.get_tensor(name).float(), rtol=1e-6, atol=1e-7)


def test_back_to_bf16(folders: Path, tmp_path: Path) -> None:
    module = low_precision_scenarios.tool_module("convert_hf_to_bf16.py")
    low_precision_scenarios.call_tool(
        module, "--model-dir", folders / "block", "--save-dir", tmp_path / "back", "--max-shard-size", 100_000
    )
    reader = open_weights(folders / "block")
    back = {}
    for file in (tmp_path / "back").glob("*.safetensors"):
        back |= load_file(file)
    assert back.keys() == reader.names and len(list((tmp_path / "back").glob("*.safetensors"))) > 2
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(back[name], reader.get_tensor(name).bfloat16())
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())


def test_training_reads_and_writes_it(gloo_world: Callable[[int], GlooWorld], folders: Path, tmp_path: Path) -> None:
    """Low-precision sources are dequantised on load; what is exported and synchronised has their names and bits."""
    for kind in KINDS:
        gloo_world(1).run(low_precision_scenarios.round_trip, str(folders / kind), str(tmp_path / kind), "")
    flags = "--tensor-model-parallel-size 2"
    gloo_world(2).run(low_precision_scenarios.round_trip, str(folders / "block"), str(tmp_path / "tp2"), flags)
