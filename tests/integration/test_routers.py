"""Routers: auxiliary losses and expert bias under every kind of layout, and against their formulas."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import layout_matrix
import moe_scenarios
import pytest
import router_scenarios
from layout_matrix import Case
from test_layout_matrix import CP2, EP2, ETP2, FULL, PP2, SELECTIVE, SP, TP2, VPP2
from tiny_hf import make_model

from tests.support.gloo_world import GlooWorld

Worlds = Callable[[int], GlooWorld]
# with the router of DeepSeek-V3: sigmoid scores, expert bias, groups, shared experts, a dense first layer
ROUTER = """
    --moe-router-bias-update-rate 0.05 --moe-router-dtype fp32 --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 0.05 --moe-z-loss-coeff 0.01
"""
# The balancing loss is one of micro-batches: all have one sample each. name -> (layout, padding and recomputation)
LAYOUTS = {
    "tp2_sp": (f"{TP2} {SP} {ETP2}", f"--data-pad-size-multiplier 16 {FULL}"),
    "pp2_vpp2": (VPP2, f"--data-pad-size-multiplier 8 {SELECTIVE} --recompute-modules moe"),
    "cp2": (CP2, "--data-pad-size-multiplier 8"),
    "ep2_dp2": (EP2, FULL),
    "pp2_tp2_sp_four": (f"{PP2} {TP2} {SP} {ETP2}", "--data-pad-size-multiplier 4"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("routers")


@pytest.fixture(scope="module")
def deepseek(folder: Path) -> str:
    return str(make_model("deepseek_v3", folder / "deepseek_v3"))


@pytest.fixture(scope="module")
def reference(folder: Path, gloo_world: Worlds, deepseek: str) -> str:
    """The file with the outcome of one process."""
    path = str(folder / "reference.pt")
    gloo_world(1).run(moe_scenarios.save_outcome, Case("deepseek_v3", ROUTER), deepseek, path)
    metrics = moe_scenarios.outcome_metrics(path)
    assert all(step["train/load_balancing_loss"] > 0.9 and step["train/z_loss"] > 0 for step in metrics)
    return path


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_equals_one_process(gloo_world: Worlds, deepseek: str, reference: str, name: str) -> None:
    """Both losses, every gradient, and after three steps parameters and expert biases."""
    layout, batching = LAYOUTS[name]
    case = Case("deepseek_v3", f"{layout} {ROUTER}", f"--micro-batch-size 1 {batching}")
    gloo_world(4 if "four" in name else 2).run(layout_matrix.compare, case, deepseek, reference)


# Sequences have balancing losses of their own: they may be packed as they like.
SEQUENCE_ROUTER = ROUTER.replace("aux_loss\n", "seq_aux_loss\n")
SEQUENCE_LAYOUTS = {
    "tp2_sp": (f"{TP2} {SP} {ETP2}", f"--use-dynamic-batch-size --max-tokens-per-gpu 48 {FULL}"),
    "pp2_vpp2": (VPP2, f"--micro-batch-size 2 --data-pad-size-multiplier 8 {FULL}"),
    "cp2": (CP2, "--use-dynamic-batch-size --max-tokens-per-gpu 90"),
    "ep2_dp2": (EP2, "--micro-batch-size 4 --data-pad-size-multiplier 16"),
}


@pytest.fixture(scope="module")
def sequence_reference(folder: Path, gloo_world: Worlds, deepseek: str) -> str:
    path = str(folder / "sequences.pt")
    case = Case("deepseek_v3", SEQUENCE_ROUTER.replace("--moe-z-loss-coeff 0.01", ""))
    gloo_world(1).run(moe_scenarios.save_outcome, case, deepseek, path)
    assert all(step["train/seq_load_balancing_loss"] > 0.9 for step in moe_scenarios.outcome_metrics(path))
    return path


@pytest.mark.parametrize("name", SEQUENCE_LAYOUTS)
def test_sequence_losses_do_not_depend_on_packing(
    gloo_world: Worlds, deepseek: str, sequence_reference: str, name: str
) -> None:
    layout, batching = SEQUENCE_LAYOUTS[name]
    router = SEQUENCE_ROUTER.replace("--moe-z-loss-coeff 0.01", "")
    case = Case("deepseek_v3", f"{layout} {router}", batching, permuted="vpp2" in name)
    gloo_world(2).run(layout_matrix.compare, case, deepseek, sequence_reference)


@pytest.mark.parametrize("size", [1, 2])
def test_gradients_are_those_of_the_formulas(gloo_world: Worlds, folder: Path, size: int) -> None:
    """Packed and padded micro-batches on one and two data-parallel ranks."""
    model_dir = folder / "qwen3_moe"
    if not model_dir.exists():
        make_model("qwen3_moe", model_dir)
    gloo_world(size).run(router_scenarios.scenario_formulas, str(model_dir))


def test_expert_bias_moves_once_per_step(gloo_world: Worlds, deepseek: str, tmp_path: Path) -> None:
    """By what training passes chose; not in log-prob passes or skipped steps; in float32 also in a bf16 model, through
    host copies and checkpoints."""
    gloo_world(1).run(router_scenarios.scenario_expert_bias, deepseek, str(tmp_path), ROUTER)
