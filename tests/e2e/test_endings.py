"""However a run ends, no process of it stays. Each run here has a Ray cluster of its own, which must end too."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from tests.support.tiny_run import tiny_run
from tests.support.train_cli import RunningTrain, TrainCli

START_TIMEOUT_S = 400
END_TIMEOUT_S = 60


@pytest.fixture
def run(train_cli: TrainCli, tiny_model_dir: Path, tmp_path: Path) -> RunningTrain:
    """A run in the middle of its work, with engine, router and trainer up."""
    run = train_cli.start(*tiny_run(tiny_model_dir, tmp_path, num_rollout=100_000), own_cluster=True)
    run.wait_for("rollout 0/", START_TIMEOUT_S)
    return run


def one_process(run: RunningTrain, words: str) -> psutil.Process:
    """The process of the run whose command line has `words`."""
    (found,) = [process for process in run.leftovers() if words in " ".join(process.cmdline())]
    return found


def test_ctrl_c(run: RunningTrain) -> None:
    run.interrupt()
    result = run.wait(END_TIMEOUT_S)
    assert result.returncode != 0
    run.assert_nothing_left()
    assert result.series("rollout/raw_reward"), "the metrics until then are kept"


def test_a_raising_reward(ray_cluster: str, train_cli: TrainCli, tiny_model_dir: Path, tmp_path: Path) -> None:
    """One message: hook, sample with its row, the user's own lines; Ray's are in the driver's log alone."""
    flags = tiny_run(tiny_model_dir, tmp_path, custom_rm_path="tests.support.tiny_run.raises_at_fifth")
    result = train_cli.run(*flags, timeout=START_TIMEOUT_S)
    assert result.returncode == 1
    assert result.output.count("ZeroDivisionError") == 1, result.tail()
    (note,) = [line for line in result.output.splitlines() if "in tests.support.tiny_run.raises_at_fifth" in line]
    assert "for sample 5 (group 1" in note and "prompts.jsonl:2)" in note
    assert "return 1 / 0" in result.output and "sglang_rollout.py" not in result.output
    assert "sglang_rollout.py" in (result.log_dir / "driver.log").read_text()


def test_killed_driver(run: RunningTrain) -> None:
    run.kill()
    assert run.wait(END_TIMEOUT_S).returncode == -signal.SIGKILL
    run.assert_nothing_left()


def test_crashed_trainer(run: RunningTrain) -> None:
    """The run ends by itself, with a non-zero status and a word about what died."""
    one_process(run, "ray::MegatronTrainRayActor").kill()
    result = run.wait(END_TIMEOUT_S)
    assert result.returncode != 0 and "ActorDied" in result.output
    run.assert_nothing_left()


def test_crashed_engine(run: RunningTrain) -> None:
    """The error names the server's log, and does not wait for requests that nobody will answer."""
    servers = [p for p in run.leftovers() if "slime.backends.sglang_utils.launch" in " ".join(p.cmdline())]
    assert servers
    for server in servers:
        server.kill()
    result = run.wait(END_TIMEOUT_S)
    assert result.returncode != 0 and "sglang-0-" in result.output and "last lines" in result.output
    run.assert_nothing_left()
