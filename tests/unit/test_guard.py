"""Guarded processes: nothing of a command outlives its owner."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from slime.ray.guard import spawn_guarded, tail

# A command whose child leaves the session, as a daemon would, and ignores SIGTERM.
_STUBBORN_TREE = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
print(os.getpid(), flush=True)
time.sleep(600)
"""


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"


def pids_in(log: Path, count: int) -> list[int]:
    assert wait_for(lambda: log.is_file() and len(log.read_text().split()) == count), log.read_text()
    return [int(word) for word in log.read_text().split()]


def test_terminate_ends_a_tree_that_ignores_sigterm_and_left_the_session(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "server.log"
    process = spawn_guarded([sys.executable, "-c", _STUBBORN_TREE], log_path=log)
    pids = pids_in(log, 2)
    assert process.poll() is None
    assert process.terminate() == -signal.SIGKILL
    assert not any(alive(pid) for pid in [*pids, process.pid])
    assert process.terminate() == -signal.SIGKILL


def test_terminate_gives_the_command_time_to_end_by_itself(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = "import signal, sys; signal.signal(15, lambda *_: sys.exit(7)); print('up', flush=True); signal.pause()"
    process = spawn_guarded([sys.executable, "-c", code], log_path=log)
    assert wait_for(lambda: "up" in process.log_tail())
    assert process.terminate(timeout=20.0) == 7


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_tree_is_killed_when_the_owner_is(tmp_path: Path, signum: int) -> None:
    log = tmp_path / "log"
    code = (
        "import sys, time; from slime.ray.guard import spawn_guarded\n"
        "p = spawn_guarded(sys.argv[2:], log_path=sys.argv[1]); print(p.pid, flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", code, str(log), sys.executable, "-c", _STUBBORN_TREE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        supervisor = int(owner.stdout.readline())
        pids = pids_in(log, 2)
        owner.send_signal(signum)
    assert wait_for(lambda: not any(alive(pid) for pid in [*pids, supervisor]))


@pytest.mark.parametrize("killed", ["front", "supervisor"])
def test_command_dies_with_what_guards_it(tmp_path: Path, killed: str) -> None:
    """Ray kills the children of a worker that it kills: of a guard that is the process in front."""
    code = "import os, tempfile, time; print(os.getpid(), tempfile.gettempdir(), flush=True); time.sleep(600)"
    process = spawn_guarded([sys.executable, "-c", code], log_path=tmp_path / "log", scratch=True)
    assert wait_for(lambda: len(process.log_tail().split()) == 2)
    pid, folder = process.log_tail().split()
    (supervisor,) = psutil.Process(process.pid).children()
    os.kill(process.pid if killed == "front" else supervisor.pid, signal.SIGKILL)
    assert wait_for(lambda: not alive(int(pid)))
    assert process.wait(10) == -signal.SIGKILL
    assert killed == "supervisor" or wait_for(lambda: not Path(folder).exists())
    shutil.rmtree(folder, ignore_errors=True)


def test_temporary_folder_of_the_command_is_removed_with_it(tmp_path: Path) -> None:
    code = "import tempfile; print(tempfile.mkdtemp())"
    process = spawn_guarded([sys.executable, "-c", code], log_path=tmp_path / "log", scratch=True)
    assert process.wait(20) == 0
    inside = Path(process.log_tail())
    assert inside.parent.name.startswith("slime-") and not inside.parent.exists()


@pytest.mark.parametrize(("code", "status"), [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", -9)])
def test_exit_status_and_log_of_the_command(tmp_path: Path, code: str, status: int) -> None:
    process = spawn_guarded(
        [sys.executable, "-c", f"print('last words', flush=True)\n{code}"], log_path=tmp_path / "l"
    )
    assert process.wait(20) == status
    assert process.log_tail(1) == "last words"


def test_command_that_is_missing_is_named_in_the_log(tmp_path: Path) -> None:
    process = spawn_guarded(["/no/such/program"], log_path=tmp_path / "log")
    assert process.wait(20) == 127
    assert "/no/such/program" in process.log_tail()


def test_environment_is_the_one_given(tmp_path: Path) -> None:
    process = spawn_guarded(
        [sys.executable, "-c", "import os; print(os.environ['MARK'])"], {"MARK": "here"}, tmp_path / "l"
    )
    assert process.wait(20) == 0
    assert process.log_tail() == "here"


def test_tail_of_a_missing_file_is_empty(tmp_path: Path) -> None:
    assert tail(tmp_path / "none") == ""
