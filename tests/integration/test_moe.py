"""Experts: routing replay under every kind of layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import layout_matrix
import moe_scenarios
import pytest
from layout_matrix import Case
from test_layout_matrix import CP2, EP2, ETP2, FULL, PP2, SELECTIVE, SP, TP2, VPP2
from tiny_hf import make_model

from tests.support.gloo_world import GlooWorld

REPLAY = "--use-routing-replay"
PACKED = "--use-dynamic-batch-size --max-tokens-per-gpu 48"
MB2_PADDED = "--micro-batch-size 2 --data-pad-size-multiplier 16"
# name -> (processes, layout, batching)
LAYOUTS = {
    "tp2_sp_full": (2, f"{TP2} {SP} {ETP2}", f"{PACKED} {FULL}"),
    "pp2_vpp2_full": (2, VPP2, f"{MB2_PADDED} {FULL}"),
    "pp2_moe_recompute": (2, PP2, f"{PACKED} {SELECTIVE} --recompute-modules moe"),
    "cp2": (2, CP2, f"{MB2_PADDED} {SELECTIVE}"),
    "ep2_dp2": (2, EP2, PACKED),
}
Worlds = Callable[[int], GlooWorld]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model("qwen3_moe", tmp_path_factory.mktemp("moe") / "qwen3_moe"))


@pytest.fixture(scope="module")
def replay_reference(tmp_path_factory: pytest.TempPathFactory, gloo_world: Worlds, model_dir: str) -> Path:
    path = tmp_path_factory.mktemp("moe") / "replay.pt"
    gloo_world(1).run(moe_scenarios.save_outcome, Case("qwen3_moe", REPLAY), model_dir, str(path))
    return path


def test_replay_acts_in_later_steps(replay_reference: Path) -> None:
    """The first step's weights are those that recorded; afterwards routers would choose otherwise."""
    shares = [
        metrics["train/routing_replay_changed"] for metrics in moe_scenarios.outcome_metrics(str(replay_reference))
    ]
    assert shares[0] == 0.0 and 0 < shares[1] < 1 and shares[2] > 0


@pytest.mark.parametrize("name", LAYOUTS)
def test_replay_equals_one_process(gloo_world: Worlds, model_dir: str, replay_reference: Path, name: str) -> None:
    """Loss, gradients, parameters and the share of changed choices do not depend on the layout."""
    size, layout, batching = LAYOUTS[name]
    case = Case("qwen3_moe", f"{layout} {REPLAY}", batching, permuted="mb" in name)
    gloo_world(size).run(layout_matrix.compare, case, model_dir, str(replay_reference))


@pytest.mark.parametrize("name", ["tp2_sp_full", "pp2_moe_recompute"])
def test_replay_of_equal_weights_changes_nothing(gloo_world: Worlds, model_dir: str, name: str) -> None:
    size, layout, batching = LAYOUTS[name]
    gloo_world(size).run(moe_scenarios.replay_changes_nothing, Case("qwen3_moe", layout, batching), model_dir)


@pytest.mark.parametrize("name", ["pp2_vpp2_full", "pp2_moe_recompute"])
def test_training_uses_the_recorded_experts(gloo_world: Worlds, model_dir: str, name: str) -> None:
    """Routers whose weights were turned round in between, and their gates get a gradient."""
    size, layout, batching = LAYOUTS[name]
    gloo_world(size).run(moe_scenarios.replay_holds_choices, Case("qwen3_moe", layout, batching), model_dir)


@pytest.mark.parametrize("flag", ["--use-routing-replay", "--use-rollout-routing-replay"])
def test_actor_uses_the_same_experts_in_both_passes(gloo_world: Worlds, model_dir: str, flag: str) -> None:
    gloo_world(1).run(moe_scenarios.actor_trains_with_replay, model_dir, flag)
