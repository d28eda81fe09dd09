"""The training actors on Ray, driven as the driver does: two data-parallel ranks, without engines."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from slime.observability.logging_utils import tracking
from slime.ray.actor_group import RayTrainGroup
from slime.ray.placement_group import create_placement_groups
from slime.ray.train_data import split_train_data_by_dp
from slime.utils.arguments import parse_args
from slime.utils.misc import Box

RANKS = 2
ROLLOUTS = 3
FLAGS = f"""
    --debug-train-only --disable-rollout-global-dataset --actor-num-gpus-per-node {RANKS} --num-rollout {ROLLOUTS}
    --rollout-batch-size 4 --n-samples-per-prompt 2 --num-steps-per-rollout 2 --rollout-max-response-len 16
    --use-dynamic-batch-size --max-tokens-per-gpu 64 --lr 1e-3 --lr-decay-style cosine
    --use-kl-loss --kl-loss-coef 0.1 --kl-loss-type low_var_kl --entropy-coef 0.001
    --use-opd --opd-type megatron --opd-kl-coef 0.3
"""


def make_args(model: Path, folder: Path, flags: str = "") -> Namespace:
    return parse_args(
        argv=f"--hf-checkpoint {model} --opd-teacher-load {model} --log-dir {folder} {FLAGS} {flags}".split()
    )


def rollout_data(args: Namespace, rollout_id: int) -> list[Box]:
    """Random samples with rewards, as the rollout manager hands them over."""
    generator = torch.Generator().manual_seed(rollout_id)
    count = args.rollout_batch_size * args.n_samples_per_prompt
    responses = torch.randint(1, 16, (count,), generator=generator).tolist()
    masks = [[1] * n for n in responses]
    data: dict[str, Any] = {
        "tokens": [torch.randint(0, args.vocab_size, (5 + n,), generator=generator).tolist() for n in responses],
        "response_lengths": responses,
        "rewards": torch.randn(count, generator=generator).tolist(),
        "raw_reward": [float(i % 2) for i in range(count)],
        "truncated": [0] * count,
        "sample_indices": list(range(count)),
        "rollout_ids": list(range(count)),
        "loss_masks": masks,
        "rollout_mask_sums": [float(sum(mask)) for mask in masks],
        "rollout_log_probs": [[-6.0] * n for n in responses],
    }
    parallel = {
        "dp_size": args.actor_num_gpus_per_node,
        "cp_size": 1,
        "vpp_size": 1,
        "microbatch_group_size_per_vp_stage": 1,
    }
    return [Box(ray.put(shard)) for shard in split_train_data_by_dp(args, data, parallel)]


def run(args: Namespace, save_after: int | None = None) -> tuple[int, list[dict[str, Any]]]:
    """(first rollout, the logged optimiser steps from there to the last rollout)."""
    with tracking(args):
        placement = create_placement_groups(args)["actor"]
        assert placement is not None and placement.pg is not None
        group = RayTrainGroup(args, 1, RANKS, placement, with_ref=True, with_opd_teacher=True)
        (start,) = set(group.create())
        for rollout_id in range(start, args.num_rollout):
            last = group.train(rollout_id, rollout_data(args, rollout_id))
            assert last["train/step"] == 2 * rollout_id + 1
            group.update_weights()
            if rollout_id == save_after:
                group.save_model(rollout_id, force_sync=True)
        for actor in group._actors:
            ray.kill(actor)
        ray.util.remove_placement_group(placement.pg)
    rows = [json.loads(line) for line in (Path(args.log_dir) / "metrics.jsonl").read_text().splitlines()]
    return start, [row for row in rows if "train/step" in row]


def training_metrics(row: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in row.items() if name.startswith("train/")}


@pytest.fixture(scope="module")
def saved_run(
    ray_cluster: str, tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, Any]]]:
    """Three rollouts, with sleep between them and a checkpoint and an export after the first."""
    folder = tmp_path_factory.mktemp("train-actor")
    flags = f"--offload-train --save {folder / 'ckpt'} --save-interval 1 --save-hf {folder / 'hf'}/{{rollout_id}}"
    start, rows = run(make_args(tiny_model_dir, folder / "log", flags), save_after=0)
    assert start == 0
    return folder, rows


def test_metrics_of_the_first_rollout(saved_run: tuple[Path, list[dict[str, Any]]]) -> None:
    """The first step is exactly on-policy, and as far from the teacher, which has the same weights, as from itself;
    every name of the surface is there; the second step is off-policy."""
    _, rows = saved_run
    assert [row["train/step"] for row in rows] == list(range(2 * ROLLOUTS))
    first = rows[0]
    assert first["train/ppo_kl"] == 0.0 and first["train/kl_loss"] == 0.0 and first["train/pg_clipfrac"] == 0.0
    assert rows[1]["train/ppo_kl"] != 0.0
    assert first["train/opd_reverse_kl"] == 0.0 and rows[2]["train/opd_reverse_kl"] != 0.0
    for name in ("loss", "pg_loss", "entropy_loss", "grad_norm", "lr-pg_0", "train_rollout_logprob_abs_diff"):
        assert math.isfinite(first[f"train/{name}"]), name
    assert first["train/global_batch_size"] == 4 and first["train/skipped_steps"] == 0


def test_the_export_of_the_first_rollout_is_complete(saved_run: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, _ = saved_run
    assert {"config.json", "model.safetensors"} <= {path.name for path in (folder / "hf" / "0").iterdir()}
    assert (folder / "ckpt" / "latest_checkpointed_iteration.txt").read_text().strip() == "0"


def test_a_resumed_run_equals_the_one_that_was_not_stopped(
    saved_run: tuple[Path, list[dict[str, Any]]], tiny_model_dir: Path
) -> None:
    """C1, C3: it goes on at rollout 1 with the same metrics; it never sleeps, so sleeping changes nothing either, and
    the actor that it keeps for old log-probs is the actor, since weights are sent after every rollout."""
    folder, rows = saved_run
    start, resumed = run(make_args(tiny_model_dir, folder / "resumed", f"--keep-old-actor --load {folder / 'ckpt'}"))
    assert start == 1
    assert list(map(training_metrics, resumed)) == list(map(training_metrics, rows[2:]))
