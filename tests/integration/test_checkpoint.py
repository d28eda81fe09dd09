"""Checkpoints: exact resume, other layouts, which iteration is loaded, conversion."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import checkpoint_scenarios
import pytest
import torch
from low_precision_scenarios import call_tool, tool_module
from safetensors.torch import load_file
from tiny_hf import make_model

from tests.support.gloo_world import GlooWorld

ONE_PROCESS = [
    "resume_one_process",
    "resume_bf16",
    "resume_moe",
    "which_iteration",
    "warm_start",
    "refuses",
    "save_is_quick",
    "export_replaces",
]
TWO_PROCESSES = [
    "resume_dp2",
    "resume_tp2",
    "resume_pp2_vpp2",
    "resume_ep2",
    "tp2_to_pp2",
    "pp2_to_tp2",
    "stored_tp2",
    "stored_ep2",
]


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("checkpoints")
    for name in ("qwen3", "qwen3_tied", "qwen3_moe"):
        make_model(name, root / "models" / name)
    return {"models": str(root / "models"), "out": str(root / "out"), "root": str(root)}


@pytest.mark.parametrize("name", ONE_PROCESS)
def test_one_process(gloo_world: Callable[[int], GlooWorld], context: dict[str, str], name: str) -> None:
    """C3: losses, gradient norms and learning rates after a resume equal the uninterrupted run's. C1, C4, L16."""
    gloo_world(1).run(getattr(checkpoint_scenarios, f"scenario_{name}"), context)


@pytest.mark.parametrize("name", TWO_PROCESSES)
def test_two_processes(gloo_world: Callable[[int], GlooWorld], context: dict[str, str], name: str) -> None:
    """C3 under data, tensor, pipeline (interleaved) and expert parallelism, and from one layout to another."""
    gloo_world(2).run(getattr(checkpoint_scenarios, f"scenario_{name}"), context)


def test_after_sleep(context: dict[str, str]) -> None:
    """Export, save and resume on groups that were destroyed and rebuilt; it patches torch, so in fresh ranks."""
    with GlooWorld(2, share_groups=False) as ranks:
        ranks.run(checkpoint_scenarios.scenario_after_sleep, context)


def test_conversion_tools(context: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """C8, C11: HF -> torch_dist (`release`) -> HF by the two command-line tools gives the same tensors back."""
    source = Path(context["models"]) / "qwen3_tied"
    there = tool_module("convert_hf_to_torch_dist.py")
    call_tool(there, "--hf-checkpoint", source, "--save", tmp_path / "megatron", "--dry-run")
    assert "4 layers, 46 weights" in capsys.readouterr().out and not (tmp_path / "megatron").exists()
    _run_tool("convert_hf_to_torch_dist.py", "--hf-checkpoint", source, "--save", tmp_path / "megatron")
    assert (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").read_text() == "release"
    back = ("--input-dir", tmp_path / "megatron", "--output-dir", tmp_path / "hf", "--origin-hf-dir", source)
    call_tool(tool_module("convert_torch_dist_to_hf.py"), *back, "--dry-run")
    assert "stored tensors" in capsys.readouterr().out and not (tmp_path / "hf").exists()
    _run_tool("convert_torch_dist_to_hf.py", *back)
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "hf" / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def _run_tool(name: str, *arguments: object) -> None:
    root = Path(__file__).parent.parent.parent
    command = [sys.executable, str(root / "tools" / name), *map(str, arguments)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
