"""Hugging Face <-> Megatron: logits equal transformers', round trips are bit-identical, under every layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import weight_scenarios
from dressed_hf import add_deepseek_prediction_layer, make_kimi
from tiny_hf import MODELS, make_model

from tests.support.gloo_world import GlooWorld

LAYOUTS = {
    "one process": "",
    "dp2": "",
    "tp2": weight_scenarios.TP2,
    "pp2": weight_scenarios.PP2,
    "pp2 vpp2": weight_scenarios.PP2_VPP2,
    "ep2": weight_scenarios.EP2,
    "tp2 ep2": weight_scenarios.TP2_EP2,
    "tp2 etp2": weight_scenarios.ETP2,
}
DENSE = ["qwen3_tied", "qwen2", "llama", "glm4", "glm4_tied"]
EXPERTS = ["qwen3_moe", "qwen2_moe", "glm4_moe", "deepseek_v3", "moonlight"]
TWO_PROCESSES = {
    "tp2": DENSE,
    "pp2": ["qwen3", *DENSE, *EXPERTS],
    "pp2 vpp2": ["qwen3_tied", "glm4", "deepseek_v3"],
    "dp2": ["llama"],
    "ep2": [*EXPERTS, "glm4_moe_lite", "kimi_k2"],
    "tp2 ep2": EXPERTS,
    "tp2 etp2": EXPERTS,
}
PREDICTING_AHEAD = ["glm4_moe", "deepseek_v3"]
CASES = [("one process", name) for name in (*MODELS, "kimi_k2")]
CASES += [(layout, name) for layout, names in TWO_PROCESSES.items() for name in names]


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("weights")
    for name in MODELS:
        make_model(name, root / "models" / name, sharded=name == "qwen3")
    make_kimi(root / "models" / "kimi_k2")
    for name in PREDICTING_AHEAD:
        make_model(name, root / "models" / f"{name}_mtp")
        add_deepseek_prediction_layer(root / "models" / f"{name}_mtp")
    return {"models": str(root / "models"), "out": str(root / "out"), "root": str(root)}


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_round_trip(gloo_world: Callable[[int], GlooWorld], context: dict[str, str], layout: str, name: str) -> None:
    """Each family, tied and untied (C8), from one file and from many, alone and split in every way."""
    size = 1 if layout == "one process" else 2
    gloo_world(size).run(weight_scenarios.check_round_trip, context, name, LAYOUTS[layout])


@pytest.mark.parametrize("name", PREDICTING_AHEAD)
@pytest.mark.parametrize("layout", ["one process", "pp2", "ep2", "tp2 etp2"])
def test_prediction_layers(
    gloo_world: Callable[[int], GlooWorld], context: dict[str, str], layout: str, name: str
) -> None:
    """Multi-token-prediction layers, trained or copied: in, and out again bit for bit."""
    size = 1 if layout == "one process" else 2
    for flags in ("--mtp-num-layers 1", "") if size == 1 else ("--mtp-num-layers 1",):
        gloo_world(size).run(weight_scenarios.check_round_trip, context, f"{name}_mtp", f"{flags} {LAYOUTS[layout]}")


@pytest.mark.parametrize("name", ["freeze", "bad_hf", "rotary_frequencies", "glm_spec"])
def test_one_process(gloo_world: Callable[[int], GlooWorld], context: dict[str, str], name: str) -> None:
    """Bad directories are refused, and parameters frozen by name."""
    gloo_world(1).run(getattr(weight_scenarios, f"scenario_{name}"), context)


def test_sync_chunks(gloo_world: Callable[[int], GlooWorld], context: dict[str, str]) -> None:
    gloo_world(2).run(weight_scenarios.scenario_sync_chunks, context)
