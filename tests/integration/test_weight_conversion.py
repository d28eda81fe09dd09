"""Hugging Face <-> Megatron: logits equal transformers', round trips are bit-identical, under every layout."""

from __future__ import annotations

from pathlib import Path

import pytest
from gloo_workers import run_scenarios
from tiny_hf import MODELS, make_model

ONE_PROCESS = [
    "single_qwen3_tied",
    "single_qwen3",
    "single_qwen2",
    "single_llama",
    "single_qwen3_moe",
    "freeze",
    "bad_hf",
]
TWO_PROCESSES = [
    "tp2_qwen3_tied",
    "tp2_qwen2",
    "pp2_qwen3",
    "pp2_vpp2_qwen3_tied",
    "dp2_llama",
    "ep2_qwen3_moe",
    "sync_chunks",
]


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("weights")
    for name in MODELS:
        make_model(name, root / "models" / name, sharded=name == "qwen3")
    return {"models": str(root / "models"), "out": str(root / "out"), "root": str(root)}


@pytest.fixture(scope="module")
def one_process(context: dict[str, str]) -> dict[str, str | None]:
    return run_scenarios("weight_scenarios", ONE_PROCESS, 1, context, Path(context["root"]) / "one")


@pytest.fixture(scope="module")
def two_processes(context: dict[str, str]) -> dict[str, str | None]:
    return run_scenarios("weight_scenarios", TWO_PROCESSES, 2, context, Path(context["root"]) / "two")


@pytest.mark.parametrize("name", ONE_PROCESS)
def test_one_process(one_process: dict[str, str | None], name: str) -> None:
    """Each family, tied and untied, from one file and from many (C8); bad directories are refused."""
    assert one_process[name] is None, one_process[name]


@pytest.mark.parametrize("name", TWO_PROCESSES)
def test_two_processes(two_processes: dict[str, str | None], name: str) -> None:
    """The same under tensor, pipeline (also interleaved), data and expert parallelism."""
    assert two_processes[name] is None, two_processes[name]
