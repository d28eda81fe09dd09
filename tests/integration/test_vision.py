"""A vision tower in front of the text model: logits, gradients, packs, layouts and weights against transformers'."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import vision_scenarios
from layout_matrix import Case
from vision_scenarios import CP2, SP, TP2, TRAINED
from vision_tiny import make_vision_model
from weight_scenarios import PP2_VPP2

from tests.support.gloo_world import GlooWorld

FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
PACKED = "--use-dynamic-batch-size --max-tokens-per-gpu 90"
LAYOUTS = {
    "packed": (1, ""),
    "tp2_sp": (2, f"{TP2} {SP}"),
    "pp2_vpp2_recompute": (2, f"{PP2_VPP2} {FULL}"),
    "cp2": (2, CP2),
    "dp2_overlap": (2, "--overlap-grad-reduce"),
}


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("vision")
    make_vision_model(root / "models" / "vision")
    make_vision_model(root / "models" / "vision_experts", "qwen3_5_experts")
    return {name: str(root / name) for name in ("models", "out", "root", "reference")} | {"root": str(root)}


@pytest.mark.parametrize("processes", [1, 2])
def test_weights(gloo_world: Callable[[int], GlooWorld], context: dict[str, str], processes: int) -> None:
    """Text rows work without images, and the export equals the source bit for bit, the tower included."""
    gloo_world(processes).run(vision_scenarios.scenario_round_trip, context)


@pytest.mark.parametrize("processes", [1, 2])
def test_images(gloo_world: Callable[[int], GlooWorld], context: dict[str, str], processes: int) -> None:
    """Two images of different sizes, text and one image in a pack: logits and gradients equal transformers'."""
    gloo_world(processes).run(vision_scenarios.scenario_images, context)


def test_checkpoints(gloo_world: Callable[[int], GlooWorld], context: dict[str, str]) -> None:
    gloo_world(2).run(vision_scenarios.scenario_stored, context)


@pytest.fixture(scope="module")
def trained(context: dict[str, str], gloo_world: Callable[[int], GlooWorld]) -> dict[str, str]:
    gloo_world(1).run(vision_scenarios.scenario_references, context)
    return context


@pytest.mark.parametrize("name", LAYOUTS)
def test_training(gloo_world: Callable[[int], GlooWorld], trained: dict[str, str], name: str) -> None:
    """Samples with images, packed with others under any layout, train as single ones, the tower's gradients too."""
    size, layout = LAYOUTS[name]
    case = Case("vision", f"{TRAINED} {layout}", PACKED, permuted=True, rollout="images", tolerance=5e-5)
    gloo_world(size).run(vision_scenarios.scenario_layout, trained, case)


def test_frozen(gloo_world: Callable[[int], GlooWorld], trained: dict[str, str]) -> None:
    gloo_world(1).run(vision_scenarios.scenario_frozen, trained)


def test_critic(gloo_world: Callable[[int], GlooWorld], context: dict[str, str]) -> None:
    gloo_world(1).run(vision_scenarios.scenario_critic, context)
