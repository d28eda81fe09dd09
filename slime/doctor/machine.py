"""Memory, disks, ports and limits of this machine."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from slime.doctor.finding import Finding

_GIB = 1024**3
# An SGLang server of a tiny model takes 1.95 GB; driver, manager, trainer and graders load libraries of their own.
MEMORY_NEEDED, MEMORY_GOOD = 4 * _GIB, 16 * _GIB
DISK_NEEDED, DISK_GOOD = 1 * _GIB, 20 * _GIB
SHARED_NEEDED = 256 * 1024**2
FILES_GOOD = 4096
PORTS = 8  # of one engine and the router


def check_memory(available: int | None = None) -> Finding:
    """Host memory: every part of a run has its processes there, and offloading keeps copies of the weights."""
    if available is None:
        import psutil

        available = psutil.virtual_memory().available
    text = f"{available / _GIB:.1f} GiB available"
    if available < MEMORY_NEEDED:
        return Finding("fail", "memory", f"{text}, a run needs {MEMORY_NEEDED // _GIB}", "end other programs")
    if available < MEMORY_GOOD:
        return Finding("note", "memory", f"{text}: enough for small models", "see --dry-run for what a model takes")
    return Finding("ok", "memory", text)


def check_disks() -> Iterator[Finding]:
    """Where logs, checkpoints, temporary files and the object store go."""
    yield check_disk("disk of outputs", Path("outputs"), DISK_NEEDED, "give --log-dir and --save on another disk")
    yield check_disk("disk of temporary files", Path(tempfile.gettempdir()), DISK_NEEDED, "set TMPDIR")
    if os.path.isdir("/dev/shm"):
        yield check_disk(
            "shared memory", Path("/dev/shm"), SHARED_NEEDED, "containers: --shm-size 8g or more; Ray keeps data there"
        )


def check_disk(subject: str, folder: Path, needed: int, fix: str) -> Finding:
    """Free space and the right to write below the first parent of `folder` that exists."""
    place = folder.resolve()
    while not place.exists():
        place = place.parent
    if not os.access(place, os.W_OK):
        return Finding("fail", subject, f"{place} can't be written to", fix)
    free = shutil.disk_usage(place).free
    text = f"{free / _GIB:.1f} GiB free at {place}"
    if free < needed:
        return Finding("fail", subject, f"{text}, a run needs {needed / _GIB:.2g}", fix)
    low = free < DISK_GOOD and needed == DISK_NEEDED
    return Finding("note" if low else "ok", subject, text, "checkpoints of large models take more" if low else "")


def check_ports() -> Finding:
    """Ports for engines and the router, and the address under which others reach this host."""
    from slime.ray.ports import hold_ports
    from slime.utils.host_info import get_host_info

    name, address = get_host_info()
    try:
        with hold_ports(PORTS) as held:
            shown = f"{held.ports[0]} to {held.ports[-1]}"
    except OSError as error:
        return Finding("fail", "ports", str(error), "end what holds them")
    return Finding("ok", "ports", f"{shown} are free; this host is {address} ({name}; SLIME_HOST_IP changes it)")


def check_limits(files: int | None = None) -> Finding:
    """Open files: Ray and the HTTP client need many."""
    if files is None:
        import resource

        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= files < FILES_GOOD:
        return Finding("note", "open files", f"at most {files} per process", f"ulimit -n {FILES_GOOD * 16}")
    return Finding("ok", "open files", "unlimited" if files < 0 else f"at most {files} per process")
