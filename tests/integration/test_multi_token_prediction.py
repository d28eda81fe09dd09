"""Multi-token-prediction layers: their loss against transformers, and under every kind of layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import checkpointed_layouts
import multi_token_scenarios
import pytest
from layout_matrix import Case
from test_layout_matrix import CP2, EP2, FULL, PP2, SP, TP2, VPP2
from tiny_hf import make_model

from tests.support.gloo_world import GlooWorld

Worlds = Callable[[int], GlooWorld]
MTP = "--mtp-num-layers 2 --enable-mtp-training"
PACKED = "--use-dynamic-batch-size --max-tokens-per-gpu 48"
# name -> (model, layout, batching); with two processes, or four
LAYOUTS = {
    "tp2_sp_full": ("qwen3", f"{TP2} {SP}", f"{PACKED} {FULL}"),
    "pp2": ("qwen3", PP2, PACKED),
    "pp2_vpp2_tied": ("qwen3_tied", VPP2, "--micro-batch-size 2 --data-pad-size-multiplier 16"),
    "cp2_full": ("qwen3", CP2, f"{PACKED} {FULL}"),
    "pp2_dp2_four": ("qwen3", PP2, "--micro-batch-size 1"),
    "ep2_latent_experts": ("deepseek_v3", EP2, PACKED),
    "dp2_tied": ("qwen3_tied", "", "--micro-batch-size 2"),
}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory, gloo_world: Worlds) -> Callable[[str], tuple[str, str]]:
    """Name of a model -> (its directory, the folder with its checkpoint and the outcome of one process)."""
    made: dict[str, tuple[str, str]] = {}

    def reference(model: str) -> tuple[str, str]:
        if model not in made:
            folder = tmp_path_factory.mktemp("mtp")
            made[model] = (str(make_model(model, folder / model)), str(folder / "checkpoint"))
            gloo_world(1).run(checkpointed_layouts.save_reference, Case(model, MTP), *made[model])
        return made[model]

    return reference


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_equals_one_process(
    gloo_world: Worlds, references: Callable[[str], tuple[str, str]], name: str
) -> None:
    """Losses of each layer and gradient norms, with sequences that nothing may cross."""
    model, layout, batching = LAYOUTS[name]
    case = Case(model, f"{layout} {MTP}", batching, permuted="tied" in name)
    gloo_world(4 if "four" in name else 2).run(checkpointed_layouts.compare, case, *references(model))


def test_loss_equals_transformers(gloo_world: Worlds, tmp_path: Path) -> None:
    """Each layer's loss and gradient on packed sequences against transformers' layers on single ones; frozen layers
    stay; the main loss and its gradients are the same bits with and without."""
    gloo_world(1).run(
        multi_token_scenarios.scenario_against_transformers, str(make_model("qwen3", tmp_path / "qwen3"))
    )
