"""Actor and critic of PPO on Ray, driven as the driver does, without engines."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import ray
from test_train_actor import rollout_data, training_metrics

from slime.observability.logging_utils import tracking
from slime.ray.models import start_train_group
from slime.ray.placement_group import create_placement_groups
from slime.utils.arguments import parse_args

ROLLOUTS = 3
FLAGS = f"""
    --debug-train-only --disable-rollout-global-dataset --actor-num-gpus-per-node 1 --num-rollout {ROLLOUTS}
    --rollout-batch-size 4
    --n-samples-per-prompt 2 --num-steps-per-rollout 2 --rollout-max-response-len 16 --use-dynamic-batch-size
    --max-tokens-per-gpu 64 --lr 1e-3 --lr-decay-style cosine --advantage-estimator ppo --lambd 0.9
    --num-critic-only-steps 1
"""
CRITIC = "megatron: [{role: critic, overrides: {lr: 5.0e-3}}]"


def make_args(model: Path, folder: Path, flags: str = "") -> Namespace:
    roles = folder.parent / "roles.yaml"
    roles.write_text(CRITIC)
    return parse_args(
        argv=f"--hf-checkpoint {model} --log-dir {folder} --megatron-config-path {roles} {FLAGS} {flags}".split()
    )


def run(args: Namespace, saves: bool) -> tuple[int, list[dict[str, Any]]]:
    """(first rollout, what the optimiser steps of both models logged, in order)."""
    with tracking(args):
        placements = create_placement_groups(args)
        group = start_train_group(args, placements, None)
        (start,) = set(group.create())
        for rollout_id in range(start, args.num_rollout):
            group.train(rollout_id, rollout_data(args, rollout_id))
            if saves and rollout_id == 0:
                group.save_model(rollout_id, force_sync=True)
        for actor in (*group.actor._actors, *group.critic._actors):
            ray.kill(actor)
        ray.util.remove_placement_group(placements["actor"].pg)
    rows = [json.loads(line) for line in (Path(args.log_dir) / "metrics.jsonl").read_text().splitlines()]
    return start, [training_metrics(row) for row in rows if "train/step" in row]


@pytest.mark.usefixtures("ray_cluster")
def test_a_run_resumed_from_its_critic_only_part_equals_the_one_that_was_not_stopped(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    """C5: after the critic-only rollout there is a checkpoint of the critic alone, from which both go on; the critic
    has the settings of its role."""
    save = tmp_path / "ckpt"
    folders = f"--save {save} --save-interval 1 --load {save}"
    start, whole = run(make_args(tiny_model_dir, tmp_path / "whole", folders), saves=True)
    assert start == 0
    assert not list(save.glob("iter_*")) and (save / "critic" / "iter_0000000").is_dir()
    critic_only, both = whole[:2], whole[2:]
    assert all("train/critic-value_loss" in row and "train/pg_loss" not in row for row in critic_only)
    assert critic_only[0]["train/critic-lr-pg_0"] == 5e-3
    assert [row["train/step"] for row in both if "train/pg_loss" in row] == [2, 3, 4, 5]

    start, resumed = run(make_args(tiny_model_dir, tmp_path / "resumed", folders), saves=False)
    assert start == 1
    assert resumed == both
