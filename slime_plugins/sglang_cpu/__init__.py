"""SGLang on plain CPUs: a platform plug-in that needs neither `sgl_kernel` nor AMX instructions.

SGLang finds it through the entry points `sglang.srt.platforms` and `sglang.srt.plugins`; it takes effect only
in a process whose environment says `SGLANG_PLATFORM=slime_cpu`, so a CUDA or Ascend server in the same
environment never sees it.
"""

from __future__ import annotations

import logging
import os
from typing import Any

logger = logging.getLogger(__name__)

PLATFORM_NAME = "slime_cpu"
SGLANG_VERSION = "0.5.23"


def is_selected() -> bool:
    """Whether this process was told to serve on the CPU platform of this package."""
    return os.environ.get("SGLANG_PLATFORM") == PLATFORM_NAME


def activate() -> str | None:
    """Entry point `sglang.srt.platforms`: the platform class's path, or None where another platform serves.

    Raises:
        RuntimeError: the installed SGLang is not the version whose internals this plug-in relies on.
    """
    if not is_selected():
        return None
    check_sglang_version()
    return "slime_plugins.sglang_cpu.platform.PlainCpuPlatform"


def register() -> None:
    """Entry point `sglang.srt.plugins`: install the hooks, if this process serves on the CPU platform."""
    if not is_selected():
        return
    check_sglang_version()
    from slime_plugins.sglang_cpu import hooks

    hooks.register()


def prepare_server(settings: dict[str, Any]) -> None:
    """Check that SGLang has applied the hooks, and take out of a server's settings what a CPU can't do.

    Args:
        settings: keyword arguments for `ServerArgs`, changed in place.
    """
    from slime_plugins.sglang_cpu import disaggregation, hooks

    hooks.verify()
    disaggregation.prepare(settings)
    # SGLang takes a device's number for a NUMA node's; here a device is a share of the machine.
    settings["base_gpu_id"] = 0
    ranks = settings.get("tp_size", 1) * settings.get("pp_size", 1) // settings.get("nnodes", 1)
    os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", cores_of_ranks(ranks, sorted(os.sched_getaffinity(0))))
    if settings.get("enable_memory_saver"):
        settings["enable_memory_saver"] = False
        logger.warning("torch_memory_saver does not start on a CPU: releasing memory will free nothing")


def cores_of_ranks(ranks: int, cores: list[int]) -> str:
    """Which cores each rank of a server uses, as SGLang wants it (`0,1|2,3`): shared out, or shared when too few."""
    own = [cores[rank * len(cores) // ranks : (rank + 1) * len(cores) // ranks] for rank in range(ranks)]
    return "|".join(",".join(map(str, part or [cores[rank % len(cores)]])) for rank, part in enumerate(own))


def check_sglang_version() -> None:
    """Refuse an SGLang that this plug-in was not written for: its hooks name functions inside SGLang."""
    from importlib.metadata import version

    installed = version("sglang")
    if installed != SGLANG_VERSION:
        raise RuntimeError(
            f"the CPU platform plug-in slime_plugins.sglang_cpu is written for sglang {SGLANG_VERSION}, "
            f"but sglang {installed} is installed; install sglang=={SGLANG_VERSION}"
        )
