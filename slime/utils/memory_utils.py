"""Host memory of this process: how much is resident, giving it back, and one line about both."""

from __future__ import annotations

import ctypes
import gc
import logging
import sys
from pathlib import Path

logger = logging.getLogger(__name__)

_GIB = 1024**3


def resident_bytes() -> int:
    """Resident set size of this process."""
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * _page_size()
    import psutil

    return psutil.Process().memory_info().rss


def _page_size() -> int:
    import resource

    return resource.getpagesize()


def trim_heap() -> None:
    """Give free heap pages back to the system, where the C library is glibc."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def clear_memory(clear_host_memory: bool = False) -> None:
    """Free what nothing uses on the device; with `clear_host_memory` also collect garbage and trim the host's heap."""
    from slime.utils import accelerator

    device = accelerator.current()
    device.synchronize()
    if clear_host_memory:
        gc.collect()
        trim_heap()
    device.empty_cache()


def available_memory() -> dict[str, float | int | str]:
    """Free, used and total GiB of the device, and this process's resident GiB on the host."""
    from slime.utils import accelerator

    device = accelerator.current()
    free, total = device.mem_get_info()
    return {
        "device": str(device.device()),
        "total_GB": round(total / _GIB, 2),
        "free_GB": round(free / _GIB, 2),
        "used_GB": round((total - free) / _GIB, 2),
        "allocated_GB": round(device.memory_allocated() / _GIB, 2),
        "host_resident_GB": round(resident_bytes() / _GIB, 2),
    }


def print_memory(message: str, clear_before_print: bool = False) -> dict[str, float | int | str]:
    """Log `available_memory` under `message` and return it."""
    if clear_before_print:
        clear_memory()
    info = available_memory()
    logger.info("[memory] %s: %s", message, info)
    return info
