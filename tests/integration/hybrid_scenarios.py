"""Scenarios of test_hybrid_families.py; several models per process, which is most of what a test costs."""

from __future__ import annotations

import layout_matrix
import torch.distributed as dist
from checkpoint_scenarios import check_other_layout, check_stored_weights
from layout_matrix import Case
from weight_scenarios import EP2, PP2, PP2_VPP2, TP2, check_round_trip

SP = "--sequence-parallel"


def scenario_single(context: dict[str, str]) -> None:
    for name in ("qwen3_next", "qwen3_5", "qwen3_5_experts", "qwen3_5_vision", "minimax_m2", "mimo"):
        check_round_trip(context, name)


def scenario_prediction_layers(context: dict[str, str]) -> None:
    layout = f"{TP2} {SP} --expert-tensor-parallel-size 2" if dist.get_world_size() == 2 else ""
    for name in ("qwen3_next", "qwen3_5_vision", "mimo"):
        check_round_trip(context, name, flags=f"--mtp-num-layers 1 {layout}")


def scenario_tp2(context: dict[str, str]) -> None:
    check_round_trip(context, "qwen3_next", flags=f"{TP2} {SP}")
    check_round_trip(context, "qwen3_5", flags=TP2)
    check_round_trip(context, "minimax_m2", flags=f"{TP2} {SP}")


def scenario_pp2(context: dict[str, str]) -> None:
    check_round_trip(context, "qwen3_next", flags=PP2)
    check_round_trip(context, "qwen3_5", flags=PP2_VPP2)
    check_round_trip(context, "minimax_m2", flags=PP2)


def scenario_ep2(context: dict[str, str]) -> None:
    check_round_trip(context, "qwen3_next", flags=EP2)
    check_round_trip(context, "qwen3_5_vision", flags=EP2)
    check_round_trip(context, "minimax_m2", flags=EP2)
    spec = "--spec slime_plugins.models.qwen3_next get_qwen3_next_spec"
    check_round_trip(context, "qwen3_next", flags=f"{EP2} {spec}")


def scenario_stored(context: dict[str, str]) -> None:
    """A checkpoint reads as the live model's export; one of TP2 loads under PP2 with its optimizer state."""
    check_stored_weights(context, "qwen3_5", TP2)
    check_stored_weights(context, "minimax_m2", EP2)
    check_stored_weights(context, "qwen3_5_vision", EP2)
    check_other_layout(context, TP2, PP2, model="qwen3_5")


def scenario_references(context: dict[str, str], models: list[str]) -> None:
    for model in models:
        layout_matrix.save_reference(model, "plain", f"{context['models']}/{model}", f"{context['root']}/{model}.pt")


def scenario_layout(context: dict[str, str], case: Case) -> None:
    layout_matrix.compare(case, f"{context['models']}/{case.model}", f"{context['root']}/{case.model}.pt")
