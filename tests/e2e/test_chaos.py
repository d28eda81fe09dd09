"""Engines, router and graders that die or hang in the middle of a run: it goes on, and nothing is lost."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from tests.support.tiny_run import tiny_run
from tests.support.train_cli import RunningTrain, TrainCli, TrainResult

START_TIMEOUT_S = 400
ROLLOUT_TIMEOUT_S = 240
NUM_ROLLOUT, PROMPTS, ANSWERS = 8, 4, 4
SERVER = "slime.backends.sglang_utils.launch"
ROUTER = "slime.ray.router_process"
GRADER = "slime.rollout.rm_hub.grader_worker"


def processes(run: RunningTrain, module: str) -> list[psutil.Process]:
    """The run's processes that execute a module, in the order of their settings' names."""
    found = [p for p in run.leftovers() if "python" in p.name() and module in p.cmdline()]
    return sorted(found, key=lambda process: process.cmdline()[-1])


def send(signum: signal.Signals, targets: list[psutil.Process], *, whole_trees: bool = False) -> None:
    """Send a signal to processes, or also to everything below them."""
    assert targets
    for target in targets:
        for process in [target, *(target.children(recursive=True) if whole_trees else [])]:
            process.send_signal(signum)


def inject(run: RunningTrain) -> None:
    """A fault after each of some rollouts."""
    for rollout in range(NUM_ROLLOUT - 1):
        run.wait_for(f"rollout {rollout}/", START_TIMEOUT_S if rollout == 0 else ROLLOUT_TIMEOUT_S)
        if rollout == 0:
            send(signal.SIGSTOP, processes(run, GRADER)[:1])
        elif rollout == 1:
            send(signal.SIGKILL, processes(run, SERVER)[:1])
        elif rollout == 3:
            send(signal.SIGSTOP, processes(run, SERVER)[-1:], whole_trees=True)
        elif rollout == 4:
            send(signal.SIGKILL, processes(run, ROUTER))
        elif rollout == 5:
            send(signal.SIGKILL, processes(run, SERVER))


def dumped_samples(folder: Path) -> Iterator[dict]:
    for rollout in range(NUM_ROLLOUT):
        yield from torch.load(folder / f"{rollout}.pt", weights_only=False)["samples"]


def test_run_survives(ray_cluster: str, train_cli: TrainCli, tiny_model_dir: Path, tmp_path: Path) -> None:
    """P17. Two engines: one killed, one hung, the router killed, all engines killed, a grader hung."""
    began = time.monotonic()
    flags = tiny_run(
        tiny_model_dir,
        tmp_path,
        num_rollout=NUM_ROLLOUT,
        colocate=None,
        rollout_num_gpus=2,
        custom_rm_path=None,
        rm_type="math",
        rm_timeout=5,
        use_fault_tolerance=True,
        rollout_health_check_interval=1,
        rollout_health_check_timeout=15,
        update_weight_timeout=20,
        check_weight_update_equal=True,
        save_debug_rollout_data=tmp_path / "dump" / "{rollout_id}.pt",
    )
    run = train_cli.start(*flags)
    inject(run)
    result = run.wait(ROLLOUT_TIMEOUT_S).check()
    run.assert_nothing_left()

    indices = [sample["index"] for sample in dumped_samples(tmp_path / "dump")]
    assert sorted(indices) == list(range(NUM_ROLLOUT * PROMPTS * ANSWERS)), "each sample is trained exactly once"
    assert total(result, "rollout/engine_failures") >= 4
    assert total(result, "rollout/router_restarts") == 1
    assert total(result, "rollout/grader_timeout") >= 1
    lost = [line for line in result.output.splitlines() if "serves again" in line]
    print(f"{time.monotonic() - began:.0f} s in all", *lost, sep="\n")
    assert len(lost) >= 4


def total(result: TrainResult, name: str) -> float:
    return sum(result.series(name).values())
