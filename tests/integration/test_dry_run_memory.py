"""The dry run's figures against what megatron-core really allocates, under every kind of layout."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_hf import MODELS, ROPE, SIZES

from tests.support.gloo_world import GlooWorld

ETP2 = "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 2"
LAYOUTS = [
    ("qwen3_tied", 1, ""),
    ("qwen2", 2, "--tensor-model-parallel-size 2"),
    ("qwen3_tied", 2, "--pipeline-model-parallel-size 2"),
    ("llama", 2, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
    ("qwen3_moe", 2, "--expert-model-parallel-size 2"),
    ("qwen3", 2, "--bf16"),
    ("glm4", 2, "--tensor-model-parallel-size 2"),
    ("qwen2_moe", 2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    ("deepseek_v3", 2, "--expert-model-parallel-size 2"),
    ("moonlight", 2, "--pipeline-model-parallel-size 2"),
    ("qwen3_tied", 2, "--pipeline-model-parallel-size 2 --advantage-estimator ppo"),  # measures the critic
    ("qwen3_moe", 4, "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2"),
    ("qwen3_tied", 1, "--lora-rank 4"),
    ("qwen3", 2, "--bf16 --tensor-model-parallel-size 2 --lora-rank 4 --lora-targets q_proj linear_fc1 o_proj"),
    ("qwen3_moe", 2, f"{ETP2} --lora-rank 4"),
    ("glm4", 2, "--pipeline-model-parallel-size 2 --lora-rank 4"),
    ("deepseek_v3", 2, "--expert-model-parallel-size 2 --lora-rank 4"),
    ("qwen3_next", 2, "--expert-model-parallel-size 2 --lora-rank 4"),
    ("qwen3_5", 2, "--tensor-model-parallel-size 2 --lora-rank 4"),
    ("qwen2_moe", 2, "--expert-model-parallel-size 2 --lora-rank 4 --lora-targets experts"),
    ("qwen3", 4, "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1"),
]


def measure(model_dir: str, flags: str) -> dict[str, Any]:
    """What this rank holds after one optimiser step, and where it stands."""
    import torch.distributed as dist
    from megatron_tiny import init_layout, make_args, train_step

    from slime.backends.megatron_utils.optimizer import setup_model_and_optimizer
    from slime.utils.dry_run.memory import stage_memory
    from slime.utils.dry_run.placement import rank_coordinates

    args = make_args(model_dir, flags=flags)
    init_layout(args)
    role = "critic" if args.use_critic else "actor"
    model, optimizer, scheduler = setup_model_and_optimizer(args, role)
    if role == "actor" and not args.sequence_parallel:
        train_step(args, model, optimizer, scheduler, 0)
    else:  # a critic gives no logits, and the steps' sequences can't be cut in 2; zero gradients make moments too
        optimizer.step()
    parameters = [parameter for chunk in model for parameter in chunk.parameters()]
    coordinates = rank_coordinates(args, dist.get_rank())
    plan = stage_memory(args, coordinates["pp"], role)
    return {
        "measured": {
            "parameters": sum(parameter.numel() for parameter in parameters),
            "weights": sum(parameter.nbytes for parameter in parameters),
            "trained": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
            "gradients": sum(parameter.main_grad.nbytes for parameter in parameters if parameter.requires_grad),
            "optimizer_state": _state_bytes(optimizer, model),
        },
        "planned": {
            "parameters": plan.parameters,
            "weights": plan.weights,
            "trained": plan.trained,
            "gradients": plan.gradients,
            "optimizer_state": plan.optimizer_state,
        },
        "coordinates": coordinates,
        "megatron": _megatron_coordinates(),
    }


def _state_bytes(optimizer: Any, model: list[Any]) -> int:
    """Moments and float32 weights, without storage that belongs to the model's own buffers."""
    buffers = [buffer for chunk in model for buffer in chunk.buffers + chunk.expert_parallel_buffers]
    model_storage = {buffer.param_data.untyped_storage().data_ptr() for buffer in buffers}
    total = 0
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.untyped_storage().data_ptr() not in model_storage:
                    total += parameter.nbytes
        for state in part.optimizer.state.values():
            total += sum(value.nbytes for value in state.values() if hasattr(value, "nbytes") and value.numel() > 1)
    return total


def _megatron_coordinates() -> dict[str, int]:
    from megatron.core import parallel_state as mpu

    return {
        "tp": mpu.get_tensor_model_parallel_rank(),
        "pp": mpu.get_pipeline_model_parallel_rank(),
        "cp": mpu.get_context_parallel_rank(),
        "dp": mpu.get_data_parallel_rank(),
        "ep": mpu.get_expert_model_parallel_rank(),
    }


@pytest.mark.parametrize(("name", "size", "flags"), LAYOUTS, ids=lambda value: str(value).replace(" ", ""))
def test_figures_are_what_megatron_allocates(
    gloo_world: Callable[[int], GlooWorld], tmp_path: Path, name: str, size: int, flags: str
) -> None:
    """Parameters, weights and gradients to the byte; optimiser state over all ranks, whose shares differ a little."""
    model = tmp_path / name
    model.mkdir()
    (model / "config.json").write_text(json.dumps({**SIZES, "rope_parameters": ROPE, **MODELS[name]}))
    ranks = gloo_world(size).run(measure, str(model), flags)
    for rank in ranks:
        for figure in ("parameters", "trained", "weights", "gradients"):
            assert rank["measured"][figure] == rank["planned"][figure], (figure, rank)
        known = {key: value for key, value in rank["coordinates"].items() if key != "rank"}
        assert known.items() <= rank["megatron"].items()
    measured, planned = (sum(rank[kind]["optimizer_state"] for rank in ranks) for kind in ("measured", "planned"))
    assert measured == pytest.approx(planned, rel=0.01)
