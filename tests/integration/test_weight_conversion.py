"""Hugging Face <-> Megatron: logits equal transformers', round trips are bit-identical, under every layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import weight_scenarios
from tiny_hf import MODELS, make_model

from tests.support.gloo_world import GlooWorld

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


@pytest.mark.parametrize("name", ONE_PROCESS)
def test_one_process(gloo_world: Callable[[int], GlooWorld], context: dict[str, str], name: str) -> None:
    """Each family, tied and untied, from one file and from many (C8); bad directories are refused."""
    gloo_world(1).run(getattr(weight_scenarios, f"scenario_{name}"), context)


@pytest.mark.parametrize("name", TWO_PROCESSES)
def test_two_processes(gloo_world: Callable[[int], GlooWorld], context: dict[str, str], name: str) -> None:
    """The same under tensor, pipeline (also interleaved), data and expert parallelism."""
    gloo_world(2).run(getattr(weight_scenarios, f"scenario_{name}"), context)
