"""--max-restarts, on a program that stands for a run: it notes how it was called, and fails as often as it is told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from slime.ray.cluster import STOPPED_STATUS

TIMEOUT_S = 60
PROGRAM = """
import os, sys, time
from argparse import Namespace
from pathlib import Path
from slime.ray.restarts import supervise

folder, behaviour = Path(sys.argv[1]), sys.argv[2]
supervise(Namespace(max_restarts=2, save=str(folder / "save"), log_dir=str(folder / "log")))
calls = folder / "calls"
with calls.open("a") as file:
    print(os.getpid(), *sys.argv[3:], file=file, flush=True)
number = len(calls.read_text().splitlines())
if behaviour == "sleep":
    time.sleep(600)
if behaviour == "usage":
    sys.exit(2)
if behaviour == "fails" or number == 1:
    (folder / "save").mkdir(exist_ok=True)
    (folder / "save" / "latest_checkpointed_iteration.txt").write_text(str(number + 6))
    sys.exit(7)
"""


def start(folder: Path, behaviour: str) -> subprocess.Popen[str]:
    program = folder / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), str(folder), behaviour, "--lr", "1"]
    return subprocess.Popen(
        ["env", "--default-signal=INT", *command], stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def calls(folder: Path) -> list[list[str]]:
    """How each run was called, its process id first."""
    path = folder / "calls"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def test_a_failed_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    process = start(tmp_path, "fails once")
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, errors
    common = ["--lr", "1", "--log-dir", str(tmp_path / "log")]
    resumed = [*common, "--load", str(tmp_path / "save"), "--no-finetune"]
    assert [call[1:] for call in calls(tmp_path)] == [common, resumed]


@pytest.mark.parametrize(("behaviour", "runs", "status"), [("fails", 3, 7), ("usage", 1, 2)])
def test_restarts_end(tmp_path: Path, behaviour: str, runs: int, status: int) -> None:
    """After so many restarts the status is the last run's; a wrong command line is not tried again."""
    process = start(tmp_path, behaviour)
    process.communicate(timeout=TIMEOUT_S)
    assert (len(calls(tmp_path)), process.returncode) == (runs, status)


@pytest.mark.parametrize("how", ["Ctrl-C", "kill"])
def test_the_run_ends_with_its_supervisor(tmp_path: Path, how: str) -> None:
    process = start(tmp_path, "sleep")
    deadline = time.monotonic() + TIMEOUT_S
    while not calls(tmp_path):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    run = psutil.Process(int(calls(tmp_path)[0][0]))
    if how == "Ctrl-C":
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.kill()
    process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == (128 + signal.SIGINT if how == "Ctrl-C" else -signal.SIGKILL)
    assert STOPPED_STATUS == 128 + signal.SIGINT
    run.wait(TIMEOUT_S)
    assert len(calls(tmp_path)) == 1
