"""The hub and its trackers in one process: nothing lost, nothing secret kept."""

from __future__ import annotations

import io
import json
import logging
import math
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slime.observability import hub_client, logging_utils
from slime.observability.hub import MetricsHub
from slime.observability.progress import Progress
from slime.observability.trackers.base import Metrics, Tracker
from slime.observability.tracking_config import public_config, resolve_wandb_mode, tracking_config


@pytest.fixture
def args(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Namespace]:
    """Arguments of a run of its own, ended however the test ends."""
    args = Namespace(run_id=request.node.name, log_dir=str(tmp_path), tb_project_name="proj", wandb_project="proj")
    yield args
    logging_utils.finish_tracking(args)


def read_events(directory: Path) -> list[tuple[str, int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(directory))
    accumulator.Reload()
    tags = accumulator.Tags()["tensors"]
    return [(tag, event.step, event.tensor_proto.float_val[0]) for tag in tags for event in accumulator.Tensors(tag)]


def test_jsonl_keeps_what_is_not_finite(args: Namespace, tmp_path: Path) -> None:
    """X13: the nan gradient norm of a skipped step is a metric, not a hole."""
    logging_utils.log(args, {"train/step": 2, "train/grad_norm": math.nan, "train/loss": 0.5}, "train/step")
    logging_utils.log(args, {"eval/step": 1, "eval/gsm": 0.25}, "eval/step")
    logging_utils.finish_tracking(args)
    train, evaluation = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert math.isnan(train["train/grad_norm"]) and train["train/loss"] == 0.5
    assert (train["step_key"], train["step"]) == ("train/step", 2)
    assert (evaluation["step_key"], evaluation["eval/gsm"]) == ("eval/step", 0.25)


def test_tensorboard_has_one_writer_and_one_file(
    args: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P13: every call of every step goes to the same event file."""
    args.use_tensorboard = True
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "tb"))
    for step in range(3):
        logging_utils.log(args, {"train/step": step, "train/loss": step / 2}, "train/step")
        logging_utils.log(args, {"rollout/step": step, "rollout/raw_reward": 1.0}, "rollout/step")
    assert hub_client.connect(args) is hub_client.connect(args)
    logging_utils.finish_tracking(args)
    assert len(list((tmp_path / "tb").iterdir())) == 1
    values = read_events(tmp_path / "tb")
    assert ("train/loss", 2, 1.0) in values and len(values) == 6


def test_tensorboard_directory_from_project_and_experiment() -> None:
    args = Namespace(use_tensorboard=True, tb_project_name="p", tb_experiment_name="e")
    assert tracking_config(args, {}).tensorboard_dir == str(Path("tensorboard_log/p/e").absolute())
    with pytest.raises(ValueError, match="--tb-project-name"):
        tracking_config(Namespace(use_tensorboard=True), {})


@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_wandb_loses_nothing_at_the_end_in_any_mode(args: Namespace, tmp_path: Path, mode: str) -> None:
    """P14: finish flushes; every mode constructs and has a run id."""
    args.use_wandb, args.wandb_mode, args.wandb_group = True, mode, "group"
    args.wandb_key = "key-that-must-stay-secret"
    logging_utils.init_tracking(args)
    assert args.wandb_run_id
    for step in range(20):
        logging_utils.log(args, {"train/step": step, "train/loss": 0.125 * step}, "train/step")
    logging_utils.finish_tracking(args)
    if mode == "disabled":
        return
    (path,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    losses = [item for item in wandb_history(path) if "train/loss" in item]
    assert [item["train/loss"] for item in losses] == [0.125 * step for step in range(20)]
    assert losses[-1]["train/step"] == 19
    kept = b"".join(p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())
    assert b"key-that-must-stay-secret" not in kept and b"wandb_group" in kept


def leveldb_log_records(data: bytes) -> Iterator[bytes]:
    """Records of a LevelDB log: in blocks of 32 KiB, each piece with crc (4 bytes), length (2) and type (1)."""
    position, record = 0, b""
    while position + 7 <= len(data):
        left_in_block = 32768 - (position + 7) % 32768  # the file's header is part of its first block
        if left_in_block < 7:
            position += left_in_block
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # full, last
            yield record
            record = b""


def wandb_history(path: Path) -> list[dict[str, Any]]:
    from wandb.proto import wandb_internal_pb2

    rows = []
    for data in leveldb_log_records(path.read_bytes()[7:]):  # 7 bytes of W&B's own header
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            rows.append(
                {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            )
    return rows


@pytest.mark.parametrize(
    "given,env,mode",
    [
        ({}, {}, "offline"),
        ({"wandb_key": "k"}, {}, "online"),
        ({}, {"WANDB_API_KEY": "k"}, "online"),
        ({"wandb_key": "k"}, {"WANDB_MODE": "offline"}, "offline"),
        ({"wandb_mode": "disabled"}, {"WANDB_MODE": "online"}, "disabled"),
    ],
)
def test_wandb_mode(given: dict[str, str], env: dict[str, str], mode: str) -> None:
    """`--wandb-mode` over WANDB_MODE over online where a login is configured; offline else."""
    assert resolve_wandb_mode(Namespace(**given), env) == mode


def test_wandb_login_in_netrc_counts(tmp_path: Path) -> None:
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password secret\n")
    assert resolve_wandb_mode(Namespace(), {"HOME": str(tmp_path)}) == "online"
    assert resolve_wandb_mode(Namespace(wandb_host="https://wandb.corp"), {"HOME": str(tmp_path)}) == "offline"


def test_an_unknown_wandb_mode_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"'ofline'.*online, offline, disabled"):
        resolve_wandb_mode(Namespace(), {"WANDB_MODE": "ofline"})


def test_secrets_never_reach_a_trackers_configuration() -> None:
    """Surface 9 [security]: the key was part of the logged arguments."""
    args = Namespace(
        wandb_key="s3cret",
        sglang_api_key="s3cret",
        router_admin_password="s3cret",
        router_control_plane_api_keys=["id:name:admin:s3cret"],
        train_env_vars={"WANDB_API_KEY": "s3cret", "HF_TOKEN": "s3cret", "OMP_NUM_THREADS": 1},
        http_proxy="http://user:s3cret@proxy:3128",
        reward_key="score",
        input_key="prompt",
        max_tokens_per_gpu=1024,
        sglang_api_keys=None,
        lr=1e-6,
        eval_prompt_data=["aime", "/data/aime.jsonl"],
        params_dtype=object,
    )
    config = public_config(args, {"SLURM_JOB_ID": "17"})
    assert "s3cret" not in json.dumps(config)
    assert (config["reward_key"], config["input_key"], config["max_tokens_per_gpu"]) == ("score", "prompt", 1024)
    assert config["lr"] == 1e-6 and config["train_env_vars"]["OMP_NUM_THREADS"] == 1
    assert config["SLURM_JOB_ID"] == "17" and config["eval_prompt_data"] == ["aime", "/data/aime.jsonl"]


def test_a_metric_without_its_step_is_an_error(args: Namespace) -> None:
    with pytest.raises(ValueError, match="without their step 'train/step'"):
        logging_utils.log(args, {"train/loss": 1.0}, "train/step")


@pytest.mark.parametrize("value", ["high", None, [1.0], {"a": 1}])
def test_a_metric_that_is_no_number_is_named(args: Namespace, value: Any) -> None:
    with pytest.raises(ValueError, match="'train/loss'"):
        logging_utils.log(args, {"train/step": 0, "train/loss": value}, "train/step")


def test_tensors_and_numpy_numbers_are_taken(args: Namespace, tmp_path: Path) -> None:
    import numpy as np
    import torch

    metrics = {
        "train/step": np.int64(1),
        "a": torch.tensor(0.5),
        "b": np.float32(0.25),
        "c": torch.tensor([2]),
        "d": True,
    }
    logging_utils.log(args, metrics, "train/step")
    record = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert [record[key] for key in "abcd"] == [0.5, 0.25, 2, 1]
    with pytest.raises(ValueError, match="'a' is not one number"):
        logging_utils.log(args, {"train/step": 1, "a": torch.ones(2)}, "train/step")


class FailingTracker(Tracker):
    """A tracker whose disk is full."""

    name = "failing"

    def log(self, metrics: Metrics, step_key: str, step: int) -> None:
        raise OSError("no space left")

    def close(self) -> None: ...

    def location(self) -> str:
        return "nowhere"


def test_a_failing_tracker_is_switched_off_loudly_and_alone(args: Namespace, tmp_path: Path) -> None:
    hub = MetricsHub(tracking_config(args, {}))
    hub._trackers.insert(0, FailingTracker())
    for step in range(2):
        hub.log({"train/step": step}, "train/step", step)
    hub.finish()
    notices = hub.drain().notices
    assert len(notices) == 1 and "no space left" in notices[0] and "failing" in notices[0]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_metrics_after_the_end_are_an_error(args: Namespace) -> None:
    hub = MetricsHub(tracking_config(args, {}))
    hub.finish()
    hub.finish()
    with pytest.raises(RuntimeError, match="train/step 3 came after"):
        hub.log({"train/step": 3}, "train/step", 3)


def test_progress_is_throttled_but_its_end_is_sent(args: Namespace) -> None:
    progress = Progress(args, "rollout 0", total=1000)
    hub = hub_client.connect(args)
    hub.drain()
    for _ in range(999):
        progress.update()
    deadline = time.monotonic() + 10
    states: list[int] = []
    while 999 not in states:  # what was held back comes without a further update
        assert time.monotonic() < deadline
        states += [event.done for event in hub.drain().progress]
    assert len(states) < 100
    progress.update(reward=0.5)
    (event,) = hub.drain().progress
    assert (event.done, event.total, event.postfix) == (1000, 1000, {"reward": 0.5})
    progress.close()
    assert hub.drain().progress[0].closed


def test_run_on_the_terminal(args: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line per rollout with what the parts reported, and one per evaluation; all of it before the end."""
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stdout", screen)
    logging_utils.configure_logger(args)
    try:
        with logging_utils.tracking(args):
            logging_utils.log(args, {"eval/step": 0, "eval/add": 0.25, "eval/add-truncated_ratio": 0.5}, "eval/step")
            logging_utils.log(
                args,
                {"rollout/step": 0, "perf/rollout_time": 2.0, "perf/tokens_per_gpu_per_sec": 1234.0},
                "rollout/step",
            )
            logging_utils.log(args, {"rollout/step": 0, "rollout/raw_reward": 0.375}, "rollout/step")
            for step, loss in enumerate((0.1, 0.3)):
                metrics = {"train/step": step, "train/loss": loss, "train/kl_loss": 0.0, "train/grad_norm": 1.5}
                logging_utils.log(args, metrics, "train/step")
            logging_utils.log(args, {"rollout/step": 0, "perf/train_time": 3.0, "perf/step_time": 5.5}, "rollout/step")
    finally:
        restore_root_logger()
    lines = screen.getvalue().splitlines()
    assert any(line == "eval 0 | add 0.250 (truncated 0.500)" for line in lines), lines
    (line,) = [line for line in lines if line.startswith("rollout 0")]
    for text in (
        "reward 0.375",
        "loss 0.200",
        "kl 0",
        "grad norm 1.500",
        "tokens/s gen 1,234",
        "gen 2.0s train 3.0s step 5.5s",
    ):
        assert text in line, line
    assert any("metrics.jsonl" in line for line in lines)


def restore_root_logger() -> None:
    root = logging.getLogger()
    for handler in [*root.handlers]:
        root.removeHandler(handler)
        handler.close()
    logging.captureWarnings(False)
