"""Which accelerator this process uses: the one that SLIME_ACCELERATOR names, else the best one that is there."""

from __future__ import annotations

import os
from collections.abc import Callable

from slime.utils.accelerator.base import Accelerator
from slime.utils.accelerator.cpu import CpuAccelerator
from slime.utils.accelerator.cuda import CudaAccelerator
from slime.utils.accelerator.npu import NpuAccelerator

ENV = "SLIME_ACCELERATOR"

# Best first; the last is always available.
_factories: dict[str, Callable[[], Accelerator]] = {
    "npu": NpuAccelerator,
    "cuda": CudaAccelerator,
    "cpu": CpuAccelerator,
}
_current: Accelerator | None = None


def register_accelerator(name: str, factory: Callable[[], Accelerator]) -> None:
    """Add a kind of device, before the ones that slime ships, or replace one."""
    others = {known: make for known, make in _factories.items() if known != name}
    _factories.clear()
    _factories.update({name: factory, **others})


def accelerator_names() -> list[str]:
    """Names that SLIME_ACCELERATOR may have."""
    return list(_factories)


def current() -> Accelerator:
    """The accelerator of this process, chosen at the first call.

    Raises:
        ValueError: SLIME_ACCELERATOR names none.
        RuntimeError: it names one that is not available.
    """
    global _current
    if _current is None:
        _current = _choose(os.environ.get(ENV, "auto"))
    return _current


def set_current(accelerator: Accelerator | str | None) -> None:
    """Use this accelerator, or the one with this name; None chooses anew at the next call of `current`."""
    global _current
    _current = _choose(accelerator) if isinstance(accelerator, str) else accelerator


def _choose(name: str) -> Accelerator:
    if name in ("", "auto"):
        return next(found for found in (make() for make in _factories.values()) if found.is_available())
    if name not in _factories:
        raise ValueError(f"{ENV}={name!r}: expected auto or one of {', '.join(_factories)}")
    chosen = _factories[name]()
    if not chosen.is_available():
        raise RuntimeError(f"{ENV}={name}, but no such device is available here")
    return chosen
