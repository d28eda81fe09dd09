"""The device, and whether the heavy packages work on it."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from slime.doctor.finding import Finding

IMPORT_SECONDS = 180
_SIGNS_OF_DEVICES = {"cuda": ("/dev/nvidia0", "/dev/kfd"), "npu": ("/dev/davinci_manager",)}

# What each part of a run does first, each in a process of its own: a broken library may take the process down.
PARTS = {
    "trainer": "from slime.utils import accelerator; accelerator.current().prepare_megatron(); "
    "import megatron.core.models.gpt, megatron.core.distributed, megatron.core.optimizer; "
    "import torch; torch.ones(2, device=accelerator.current().device()).sum().item()",
    "engine": "from sglang.srt.server_args import ServerArgs; import sglang.srt.entrypoints.http_server",
    "router": "from sglang_router.router_args import RouterArgs",
    "cluster": "import ray",
    "tokenizer": "from transformers import AutoTokenizer",
}


def check_device() -> Iterator[Finding]:
    """Which accelerator a run would use. A device that is there but can't be used is a note: the run would be slow."""
    from slime.utils import accelerator

    try:
        current = accelerator.current()
    except (RuntimeError, ValueError) as error:
        yield Finding("fail", "device", str(error), "unset SLIME_ACCELERATOR to take the best device there is")
        return
    count = current.device_count()
    kind = "cores of a CPU" if current.name == "cpu" else f"{current.name} device(s)"
    yield Finding("ok" if count else "fail", "device", f"{count} {kind}, {current.collective_backend} for collectives")
    chosen = os.environ.get("SLIME_ACCELERATOR")
    for name, files in _SIGNS_OF_DEVICES.items():
        if current.name == "cpu" and chosen != "cpu" and any(map(os.path.exists, files)):
            yield Finding(
                "note", "device", f"there is a {name} device, but this installation can't use it",
                f"SLIME_DEVICE={name} bash scripts/setup.sh",
            )  # fmt: skip


def check_parts(parts: dict[str, str] | None = None, seconds: float = IMPORT_SECONDS) -> Iterator[Finding]:
    """Import what each part of a run imports."""
    chosen = PARTS if parts is None else parts
    with ThreadPoolExecutor(2) as pool:
        yield from pool.map(_try, chosen.keys(), chosen.values(), itertools.repeat(seconds))


def _try(name: str, code: str, seconds: float) -> Finding:
    from slime.utils import accelerator

    env = {**os.environ, **accelerator.current().engine_env()} if name == "engine" else dict(os.environ)
    try:
        result = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code], env=env, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return Finding("fail", name, f"its packages were not imported within {seconds:g} s", "is the disk overloaded?")
    if result.returncode == 0:
        return Finding("ok", name, "its packages can be imported")
    lines = result.stderr.strip().splitlines() or [f"the process ended with status {result.returncode}"]
    return Finding("fail", name, lines[-1], "bash scripts/setup.sh")
