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


def wait_for_checkpoint(folder: Path, iteration: int, timeout: float) -> None:
    """Return once the checkpoint of `iteration` and its data state are complete."""
    latest = folder / "latest_checkpointed_iteration.txt"
    data_state = folder / "rollout" / f"global_dataset_state_dict_{iteration}.pt"
    deadline = time.monotonic() + timeout
    while not (latest.exists() and latest.read_text().strip() == str(iteration) and data_state.exists()):
        assert time.monotonic() < deadline, f"no checkpoint {iteration} in {folder} within {timeout:.0f} s"
        time.sleep(0.05)


def test_killed_and_resumed_equals_uninterrupted(train_cli: TrainCli, tiny_model_dir: Path, tmp_path: Path) -> None:
    """Issue 2's gate; C1: the resumed run starts at the rollout after the checkpoint."""

    def flags(**changes: Any) -> list[str]:
        settings = {"num_rollout": 3, "save_interval": 1, "sglang_enable_deterministic_inference": True, **changes}
        return tiny_run(tiny_model_dir, tmp_path, rollout_shuffle=True, **settings)

    whole = train_cli.run(*flags(save=tmp_path / "whole"), timeout=RUN_TIMEOUT_S, own_cluster=True).check()

    saved = tmp_path / "killed"
    # The whole run's schedule, but it never gets to rollout 2: it is killed when rollout 1 is saved.
    killed = train_cli.start(*flags(save=saved, save_interval=2), own_cluster=True)
    wait_for_checkpoint(saved, 1, RUN_TIMEOUT_S)
    killed.kill()
    killed.wait(60)
    killed.assert_nothing_left()
    background = {"async_save": True, "keep_checkpoints": 1}
    resumed = train_cli.run(*flags(save=saved, load=saved, **background), timeout=RUN_TIMEOUT_S, own_cluster=True)
    resumed.check()

    assert set(resumed.series("train/loss")) == {2}
    for name in SAME:
        assert resumed.series(name)[2] == pytest.approx(whole.series(name)[2], rel=1e-4, abs=1e-7), name

    # The last save waited for its background write; what it made superfluous is gone.
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert [path.name for path in sorted(saved.iterdir()) if path.is_dir()] == ["iter_0000002", "rollout"]
    assert [path.name for path in (saved / "rollout").iterdir()] == ["global_dataset_state_dict_2.pt"]
