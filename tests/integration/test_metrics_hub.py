"""The metrics hub as a Ray actor: reached by name, small, and complete at the end."""

from __future__ import annotations

import io
import json
import logging
import sys
import time
import uuid
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from slime.observability import hub_client, logging_utils
from slime.observability.progress import Progress
from slime.observability.timer import Timer


@pytest.fixture
def args(ray_cluster: str, tmp_path: Path) -> Iterator[Namespace]:
    args = Namespace(run_id=uuid.uuid4().hex[:8], log_dir=str(tmp_path))
    yield args
    logging_utils.finish_tracking(args)


@ray.remote(num_cpus=0)
class Worker:
    """Any process of a run."""

    def __init__(self, args: Namespace, role: str) -> None:
        logging_utils.configure_logger(args, role)
        self.args = args

    def log(self, rank: int, count: int) -> None:
        logger = logging.getLogger("slime.test")
        logger.info("an ordinary line")
        for step in range(count):
            logging_utils.log(self.args, {"train/step": step, f"train/value_{rank}": step}, "train/step")

    def progress(self) -> None:
        progress = Progress(self.args, "rollout 3", 8)
        progress.update(5, reward=0.5)
        time.sleep(1.0)
        progress.update(3)
        progress.close()


def records(args: Namespace) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(args.log_dir, "metrics.jsonl").read_text().splitlines()]


def test_no_metric_of_any_process_is_lost_at_the_end(args: Namespace, tmp_path: Path) -> None:
    """P14: metrics logged just before the end, in other processes, are there."""
    logging_utils.init_tracking(args)
    workers = [Worker.remote(args, f"worker-{rank}") for rank in range(2)]
    ray.get([worker.log.remote(rank, 50) for rank, worker in enumerate(workers)])
    for worker in workers:
        ray.kill(worker)
    logging_utils.finish_tracking(args)
    for rank in range(2):
        assert [record["step"] for record in records(args) if f"train/value_{rank}" in record] == list(range(50))
        assert "an ordinary line" in (tmp_path / f"worker-{rank}.log").read_text()


def test_the_hub_needs_no_torch_and_ends_with_the_run(args: Namespace) -> None:
    args.use_tensorboard, args.use_wandb, args.wandb_project, args.tb_project_name = True, True, "p", "p"
    args.wandb_mode = "offline"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TENSORBOARD_DIR", f"{args.log_dir}/tb")
        logging_utils.init_tracking(args)
    logging_utils.log(args, {"rollout/step": 0, "rollout/raw_reward": 0.5}, "rollout/step")
    hub = ray.get_actor(hub_client.hub_name(args.run_id), namespace=hub_client.NAMESPACE)
    loaded = ray.get(hub.__ray_call__.remote(lambda self: sorted(sys.modules)))
    assert "wandb" in loaded and "tensorboard.summary" in loaded
    assert not {"torch", "megatron", "sglang", "transformers"} & set(loaded)
    logging_utils.finish_tracking(args)
    assert list(Path(args.log_dir, "wandb").glob("offline-run-*/run-*.wandb"))
    with pytest.raises(RuntimeError, match=f"run {args.run_id} has no metrics hub"):
        hub_client.connect(args)


def test_logging_without_tracking_is_an_error(args: Namespace) -> None:
    with pytest.raises(RuntimeError, match="the driver calls init_tracking first"):
        logging_utils.log(args, {"train/step": 0}, "train/step")
    with pytest.raises(RuntimeError, match="the driver calls init_tracking first"):
        logging_utils.init_tracking(args, primary=False)


def test_another_processs_progress_shows_on_the_drivers_terminal(
    args: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    handlers = logging.getLogger().handlers[:]
    logging.getLogger().handlers = []  # the terminal is then a fresh one on stdout
    try:
        with logging_utils.tracking(args):
            worker = Worker.remote(args, "rollout-manager")
            ray.get(worker.progress.remote())
    finally:
        logging.getLogger().handlers = handlers
    ray.kill(worker)
    bar = screen.getvalue()
    assert "rollout 3 [" in bar and "5/8" in bar and "reward 0.5" in bar
    assert bar.endswith("\x1b[2K")  # nothing of the bar stays


def log_from_ranks(log_dir: str) -> dict[str, float] | None:
    """Two data-parallel ranks with different numbers of samples."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    from slime.observability import train_metric_utils

    parallel_state.initialize_model_parallel()
    rank = dist.get_rank()
    args = Namespace(run_id="ranks", log_dir=log_dir, log_correct_samples=True, rollout_max_response_len=40)
    partition = [[0, 3, 4], [1, 2]][rank]
    lengths = [[10, 40, 8], [20, 30]][rank]
    rollout_data = {
        "partition": partition,
        "tokens": [torch.zeros(length + 2, dtype=torch.long) for length in lengths],
        "raw_reward": [1.0, 0.0, 1.0, 0.0, 0.0],
        "rewards": [[0.5, -0.5, 0.0], [-1.0, 1.0]][rank],
        "response_lengths": lengths,
        "total_lengths": [length + 2 for length in lengths],
        "loss_masks": [torch.ones(length, dtype=torch.int) for length in lengths],
        "rollout_mask_sums": torch.tensor([float(length) for length in lengths]),
        "log_probs": [torch.full((length,), -float(length)) for length in lengths],
        "sample_indices": partition,
        "global_batch_sizes": [5],
        "round_number": [1] * len(lengths),
    }
    train_metric_utils.log_rollout_data(7, args, rollout_data)
    train_metric_utils.log_multi_turn_data(7, args, rollout_data)
    Timer().reset()  # other tests have trained in this process
    Timer().add("actor_train", 2.0)
    Timer().add("train", 3.0)
    Timer().add("train_wait", 1.0)
    train_metric_utils.log_perf_data(7, args, {"update_weights_density": 0.5})
    assert Timer().log_dict() == {}
    reduced = train_metric_utils.reduce_train_step_metrics(
        [{"keys": ["loss"], "values": torch.tensor([4.0, 2.0 + rank])} for _ in range(2)],
        calculate_per_token_loss=False,
        step_global_batch_size=5,
        cp_size=1,
        dp_with_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
    )
    per_token = train_metric_utils.reduce_train_step_metrics(
        [{"keys": ["loss"], "values": torch.tensor([3.0 + rank, 3.5])}],
        calculate_per_token_loss=True,
        step_global_batch_size=5,
        cp_size=1,
        dp_with_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
    )
    logging_utils.finish_tracking(args)
    return {"step": reduced["loss"], "per_token": per_token["loss"]}


def test_trainer_metrics_are_reduced_over_samples_not_ranks(gloo_world: Any, tmp_path: Path) -> None:
    """X14: correct lengths pair local rewards with local lengths. Unequal shards weigh by their samples."""
    for result in gloo_world(2).run(log_from_ranks, str(tmp_path)):
        assert result["step"] == pytest.approx((2 + 2 + 3 + 3) / 5)
        assert result["per_token"] == pytest.approx(7 / 7)
    found: dict[str, float] = {}
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        found |= json.loads(line)
    assert found["rollout/step"] == 7
    assert found["rollout/response_lengths"] == pytest.approx((10 + 40 + 8 + 20 + 30) / 5)
    assert found["rollout/rewards"] == pytest.approx(0.0)
    assert found["rollout/raw_reward"] == pytest.approx(0.4)
    assert found["rollout/log_probs"] == pytest.approx(-(10 + 40 + 8 + 20 + 30) / 5)
    assert found["rollout/correct_response_lengths"] == pytest.approx((10 + 30) / 2)
    assert not {"rollout/partition", "rollout/sample_indices", "rollout/tokens"} & found.keys()
    assert found["multi_turn/raw_response_length/response_length_max"] == 40
    assert found["multi_turn/raw_response_length/response_length_clip_ratio"] == pytest.approx(0.2)
    assert found["multi_turn/multi_turn_metric/round_number_mean"] == 1
    assert (found["perf/actor_train_time"], found["perf/step_time"], found["perf/wait_time_ratio"]) == (2.0, 4.0, 0.25)
    assert found["perf/update_weights_density"] == 0.5
