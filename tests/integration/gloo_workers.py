"""Run named scenarios in one set of gloo processes: starting Megatron is slow, so many layouts share it.

A scenario is a function `scenario_<name>(context: dict[str, str])` of a module in this folder; every process runs it,
in order. Its outcome (None, or the first failing rank's traceback) becomes one pytest assertion.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

HERE = Path(__file__).parent


def run_scenarios(
    module: str, names: list[str], world_size: int, context: dict[str, str], log_dir: Path, timeout: float = 240
) -> dict[str, str | None]:
    """Outcome by scenario name. Scenarios that never ran (a process died or hung) say so with the end of the log."""
    _wait(start_workers(module, names, world_size, context, log_dir), timeout)
    return {name: _outcome(name, log_dir, world_size) for name in names}


def start_workers(
    module: str, names: list[str], world_size: int, context: dict[str, str], log_dir: Path
) -> list[subprocess.Popen[bytes]]:
    """One process per rank, each in its own session; logs and outcomes go to `log_dir`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log_dir.mkdir(parents=True, exist_ok=True)
    job = json.dumps({"module": module, "names": names, "context": context, "results": str(log_dir)})
    processes = []
    for rank in range(world_size):
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "PYTHONPATH": os.pathsep.join([str(HERE.parent.parent), str(HERE)]),
        }
        with open(log_dir / f"rank{rank}.log", "w") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, __file__, job],
                    env=env,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
    return processes


def _wait(processes: list[subprocess.Popen[bytes]], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while any(process.poll() is None for process in processes):
        # one dead rank leaves the others in a collective
        failed = any(process.poll() not in (None, 0) for process in processes)
        if failed or time.monotonic() > deadline:
            time.sleep(1)
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        time.sleep(0.05)


def _outcome(name: str, log_dir: Path, world_size: int) -> str | None:
    for rank in range(world_size):
        result = log_dir / f"{name}.rank{rank}"
        if not result.exists():
            log = (log_dir / f"rank{rank}.log").read_text()
            return f"rank {rank} did not finish {name}; its log ends with:\n{log[-3000:]}"
        if text := result.read_text():
            return f"rank {rank}: {text}"
    return None


def _run_job(job: dict) -> int:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    from slime.utils.accelerator import current

    current().prepare_megatron()
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    module = importlib.import_module(job["module"])
    for name in job["names"]:
        started = time.monotonic()
        try:
            getattr(module, f"scenario_{name}")(job["context"])
            text = ""
        except Exception:
            text = traceback.format_exc()
        Path(job["results"], f"{name}.rank{dist.get_rank()}").write_text(text)
        print(f"{name}: {time.monotonic() - started:.1f} s {'failed' if text else 'passed'}\n{text}", flush=True)
        if text and dist.get_world_size() > 1:
            return 1  # the ranks no longer agree on what comes next
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(_run_job(json.loads(sys.argv[1])))
