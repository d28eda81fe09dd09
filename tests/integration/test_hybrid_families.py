"""Families with gated delta nets or norms over all heads: logits, round trips, packs and gradients."""

from __future__ import annotations

from collections.abc import Callable

import hybrid_scenarios
import pytest
from dressed_hf import add_qwen_prediction_layer, make_mimo, make_qwen3_5_moe
from layout_matrix import Case
from tiny_hf import make_model

from tests.support.gloo_world import GlooWorld

MODELS = ("qwen3_next", "qwen3_5", "qwen3_5_experts", "minimax_m2")
TP2, CP2 = "--tensor-model-parallel-size 2", "--context-parallel-size 2"
PACKED = "--use-dynamic-batch-size --max-tokens-per-gpu 90"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
TOLERANCE = 5e-5  # A gated delta net adds up whole sequences in float32.


def case(model: str, layout: str, batching: str = PACKED) -> Case:
    return Case(model, layout, batching, permuted=True, tolerance=TOLERANCE)


# name -> (processes, case)
LAYOUTS = {
    "next_packed": (1, case("qwen3_next", "")),
    "next_tp2_sp": (2, case("qwen3_next", f"{TP2} --sequence-parallel", f"{PACKED} {FULL}")),
    "next_ep2": (2, case("qwen3_next", "--expert-model-parallel-size 2")),
    "5_tp2": (2, case("qwen3_5", TP2)),
    "5_cp2": (2, case("qwen3_5", CP2)),
    "minimax_tp2_sp": (2, case("minimax_m2", f"{TP2} --sequence-parallel")),
}


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("hybrid")
    models = root / "models"
    for name in MODELS:
        make_model(name, models / name)
    make_mimo(models / "mimo")
    add_qwen_prediction_layer(models / "qwen3_next")
    add_qwen_prediction_layer(models / "qwen3_5_experts")
    make_qwen3_5_moe(models / "qwen3_5_experts", models / "qwen3_5_vision")
    return {"models": str(root / "models"), "out": str(root / "out"), "root": str(root)}


@pytest.fixture(scope="module")
def references(context: dict[str, str], gloo_world: Callable[[int], GlooWorld]) -> dict[str, str]:
    """What one process with one sample per micro-batch computes: no sequence has a neighbour that could leak."""
    models = {case.model for _, case in LAYOUTS.values()}
    gloo_world(1).run(hybrid_scenarios.scenario_references, context, sorted(models))
    return context


def test_one_process(gloo_world: Callable[[int], GlooWorld], context: dict[str, str]) -> None:
    """Logits equal transformers', and the export equals the source bit for bit, what the trainer left out included."""
    gloo_world(1).run(hybrid_scenarios.scenario_single, context)


@pytest.mark.parametrize("processes", [1, 2])
def test_prediction_layers(gloo_world: Callable[[int], GlooWorld], context: dict[str, str], processes: int) -> None:
    """Multi-token-prediction layers under the names of MiMo and of Qwen: in, and out again bit for bit."""
    gloo_world(processes).run(hybrid_scenarios.scenario_prediction_layers, context)


@pytest.mark.parametrize("name", ["tp2", "pp2", "ep2", "stored"])
def test_two_processes(gloo_world: Callable[[int], GlooWorld], context: dict[str, str], name: str) -> None:
    """The same under tensor, pipeline (also interleaved) and expert parallelism."""
    gloo_world(2).run(getattr(hybrid_scenarios, f"scenario_{name}"), context)


@pytest.mark.parametrize("name", LAYOUTS)
def test_training(gloo_world: Callable[[int], GlooWorld], references: dict[str, str], name: str) -> None:
    """Packed samples train as single ones, every gradient, under any layout: states don't cross sequences."""
    size, layout = LAYOUTS[name]
    gloo_world(size).run(hybrid_scenarios.scenario_layout, references, layout)
