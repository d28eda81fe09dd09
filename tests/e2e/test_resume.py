"""A run that was killed and resumed equals one that was not."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_run import tiny_run
from tests.support.train_cli import TrainCli

RUN_TIMEOUT_S = 420
SAME = (
    "rollout/raw_reward",
    "rollout/rollout_log_probs",
    "train/loss",
    "train/kl_loss",
    "train/grad_norm",
    "train/lr-pg_0",
)

BY_DISK = {"update_weight_transport": "disk", "check_weight_update_equal": True}


def wait_for_checkpoint(folder: Path, iteration: int, timeout: float) -> None:
    """Return once the checkpoint of `iteration` and its data state are complete."""
    latest = folder / "latest_checkpointed_iteration.txt"
    data_state = folder / "rollout" / f"global_dataset_state_dict_{iteration}.pt"
    deadline = time.monotonic() + timeout
    while not (latest.exists() and latest.read_text().strip() == str(iteration) and data_state.exists()):
        assert time.monotonic() < deadline, f"no checkpoint {iteration} in {folder} within {timeout:.0f} s"
        time.sleep(0.05)


def test_killed_and_resumed_equals_uninterrupted(train_cli: TrainCli, tiny_model_dir: Path, tmp_path: Path) -> None:
    """C1: the resumed run starts at the rollout after the checkpoint. L15: it doesn't evaluate before that.

    It sends weights another way than the uninterrupted one.
    """

    def flags(**changes: Any) -> list[str]:
        settings = {"num_rollout": 3, "save_interval": 1, "sglang_enable_deterministic_inference": True, **changes}
        settings |= {"eval_prompt_data": ["held-out", f"{tmp_path / 'prompts.jsonl'}@[0:2]"], "eval_interval": 3}
        return tiny_run(tiny_model_dir, tmp_path, rollout_shuffle=True, **settings)

    whole = train_cli.run(*flags(save=tmp_path / "whole"), timeout=RUN_TIMEOUT_S, own_cluster=True).check()

    saved = tmp_path / "killed"
    # The whole run's schedule, but it never gets to rollout 2: it is killed when rollout 1 is saved.
    killed = train_cli.start(*flags(save=saved, save_interval=2), own_cluster=True)
    wait_for_checkpoint(saved, 1, RUN_TIMEOUT_S)
    killed.kill()
    killed.wait(60)
    killed.assert_nothing_left()
    others = {"async_save": True, "keep_checkpoints": 1, **BY_DISK, "update_weight_disk_dir": tmp_path / "weights"}
    resumed = train_cli.run(*flags(save=saved, load=saved, **others), timeout=RUN_TIMEOUT_S, own_cluster=True)
    resumed.check()

    assert set(resumed.series("train/loss")) == set(resumed.series("eval/held-out")) == {2}
    assert set(whole.series("eval/held-out")) == {0, 2}
    for name in SAME:
        assert resumed.series(name)[2] == pytest.approx(whole.series(name)[2], rel=1e-4, abs=1e-7), name

    assert not list((tmp_path / "weights").iterdir()), "what engines have loaded is removed"

    # The last save waited for its background write; what it made superfluous is gone.
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert [path.name for path in sorted(saved.iterdir()) if path.is_dir()] == ["iter_0000002", "rollout"]
    assert [path.name for path in (saved / "rollout").iterdir()] == ["global_dataset_state_dict_2.pt"]


def test_crashed_trainer_and_max_restarts(train_cli: TrainCli, tiny_model_dir: Path, tmp_path: Path) -> None:
    """The run starts again by itself and goes on after its checkpoint, under the same metrics file."""
    saved = tmp_path / "saved"
    settings = {"num_rollout": 3, "save": saved, "save_interval": 1, "max_restarts": 1, "load": saved}
    run = train_cli.start(*tiny_run(tiny_model_dir, tmp_path, **settings), own_cluster=True)
    wait_for_checkpoint(saved, 0, RUN_TIMEOUT_S)
    (trainer,) = [process for process in run.leftovers() if "ray::MegatronTrain" in " ".join(process.cmdline())]
    trainer.kill()
    result = run.wait(RUN_TIMEOUT_S).check()
    run.assert_nothing_left()
    assert "1 of 1 restarts are left" in result.output
    assert set(result.series("train/loss")) == {0, 1, 2}
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == "2"
