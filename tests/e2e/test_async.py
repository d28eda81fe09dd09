"""`train_async.py` with PPO: actor and critic take turns on one device, the engine has its own."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path
from typing import Any

from tests.e2e.test_resume import wait_for_checkpoint
from tests.support.tiny_run import tiny_run
from tests.support.train_cli import TrainCli

RUN_TIMEOUT_S = 420
PROMPTS = 16
LAST = 3


def dumped(folder: Path, rollout_id: int) -> list[dict[str, Any]]:
    import torch

    return torch.load(folder / f"{rollout_id}.pt", weights_only=False)["samples"]


def test_stopped_and_resumed_trains_each_prompt_once(
    train_cli: TrainCli, tiny_model_dir: Path, tmp_path: Path
) -> None:
    """L14; the rollout that was already under way when the run was stopped is made again. Ctrl-C leaves no process.

    The resumed run sends deltas, the first one of the loaded weights.
    """

    def flags(dumps: Path, **changes: Any) -> list[str]:
        return tiny_run(
            tiny_model_dir, tmp_path, colocate=None, rollout_num_gpus=1, num_rollout=LAST + 1, save=tmp_path / "ckpt",
            save_interval=2, rollout_shuffle=True, save_debug_rollout_data=dumps / "{rollout_id}.pt",
            check_weight_update_equal=True, advantage_estimator="ppo", use_kl_loss=None, kl_loss_coef=None,
            kl_loss_type=None, ref_load=None, **changes,
        )  # fmt: skip

    first, second = tmp_path / "first", tmp_path / "second"
    run = train_cli.start(*flags(first), script="train_async.py", own_cluster=True)
    wait_for_checkpoint(tmp_path / "ckpt", 1, RUN_TIMEOUT_S)
    run.interrupt()
    stopped = run.wait(60)
    assert stopped.returncode not in (0, -signal.SIGKILL)
    run.assert_nothing_left()
    delta = {
        "update_weight_mode": "delta", "update_weight_transport": "disk", "update_weight_disk_dir": tmp_path / "sent",
        "update_weight_local_checkpoint_dir": tmp_path / "host",
    }  # fmt: skip
    resumed = train_cli.run(
        *flags(second, load=tmp_path / "ckpt", **delta), script="train_async.py", timeout=RUN_TIMEOUT_S,
        own_cluster=True,
    ).check()  # fmt: skip

    assert {0, 1} <= set(stopped.series("train/loss")) and set(resumed.series("train/loss")) == {2, LAST}
    assert set(resumed.series("train/critic-value_loss")) == {2, LAST}
    before = [sample for rollout_id in (0, 1) for sample in dumped(first, rollout_id)]
    after = [sample for rollout_id in (2, LAST) for sample in dumped(second, rollout_id)]
    times = Counter(sample["prompt"] for sample in before + after)
    assert len(times) == PROMPTS and set(times.values()) == {4}, "four answers to each prompt, trained once"
    # each run makes its first two rollouts before it sends weights again; versions count on after a resume
    assert {tuple(sample["weight_versions"]) for sample in before} == {("1",)}
    assert {tuple(sample["weight_versions"]) for sample in after} == {("3",)}
    assert next(iter(resumed.series("perf/update_weights_density").values())) == 1.0
    assert all(size > 0 for size in resumed.series("perf/update_weights_wire_bytes").values())
