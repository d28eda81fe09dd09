"""`ray start` and `ray job submit -- python train.py …`, as on a cluster."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from slime.utils.misc import get_free_port
from tests.support.tiny_model import REPOSITORY
from tests.support.tiny_run import tiny_run

START_TIMEOUT_S = 120
JOB_TIMEOUT_S = 300
RAY = Path(sys.executable).parent / "ray"


@dataclass(frozen=True)
class HeadNode:
    """A cluster of its own, and the environment of its clients."""

    dashboard: str
    env: dict[str, str]


@pytest.fixture
def head_node() -> Iterator[HeadNode]:
    # not tmp_path: sockets below the folder must have short paths
    folder = tempfile.mkdtemp(prefix="ray-")
    env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "token-of-this-test" * 4, "RAY_TMPDIR": folder}
    ports = [get_free_port() for _ in range(4)]
    command = [
        RAY, "start", "--head", "--block", f"--temp-dir={folder}", "--num-cpus=2", "--disable-usage-stats",
        "--object-store-memory=200000000", f"--port={ports[0]}", f"--dashboard-port={ports[1]}",
        f"--dashboard-agent-listen-port={ports[2]}", f"--dashboard-agent-grpc-port={ports[3]}",
    ]  # fmt: skip
    head = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert head.stdout is not None
        seen = []
        for line in head.stdout:
            seen.append(line)
            if "Ray runtime started" in line:
                break
        else:
            raise AssertionError("the head node did not start:\n" + "".join(seen))
        yield HeadNode(f"http://127.0.0.1:{ports[1]}", env)
    finally:
        head.terminate()
        head.wait(timeout=60)
        shutil.rmtree(folder, ignore_errors=True)


def test_job(head_node: HeadNode, tiny_model_dir: Path, tmp_path: Path) -> None:
    """The driver runs inside the cluster, joins it, and its lines and exit status reach the submitter."""
    flags = tiny_run(
        tiny_model_dir, tmp_path, num_rollout=1, debug_rollout_only=True, log_dir=tmp_path / "log", ref_load=None
    )
    command = [RAY, "job", "submit", f"--address={head_node.dashboard}", "--"]
    command += [sys.executable, REPOSITORY / "train.py", *flags]
    result = subprocess.run(
        [str(word) for word in command],
        env={**head_node.env, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=JOB_TIMEOUT_S,
    )
    output = result.stdout + result.stderr
    assert result.returncode == 0, output[-3000:]
    assert "rollout 0/0 |" in output, output[-3000:]
    assert (tmp_path / "log" / "metrics.jsonl").is_file()
