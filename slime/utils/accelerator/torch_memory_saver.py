"""The memory saver of CUDA and Ascend: torch_memory_saver, whose library intercepts the device's allocations."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

from slime.utils.accelerator.base import Accelerator
from slime.utils.accelerator.memory_saver import MemorySaver

_LIBRARY = "torch_memory_saver_hook_mode_preload"
_ENABLE = "TMS_INIT_ENABLE"


def preload_env() -> dict[str, str]:
    """Environment that makes a process's device memory pausable from its start, with copies in host memory.

    Raises:
        ModuleNotFoundError: torch_memory_saver is not installed.
    """
    from torch_memory_saver.utils import get_binary_path_from_package

    library = str(get_binary_path_from_package(_LIBRARY))
    preloaded = [path for path in os.environ.get("LD_PRELOAD", "").split(":") if path and _LIBRARY not in path]
    return {
        "LD_PRELOAD": ":".join([library, *preloaded]),
        _ENABLE: "1",
        "TMS_INIT_ENABLE_CPU_BACKUP": "1",
    }


class TorchMemorySaver(MemorySaver):
    """Pauses all of the process's device memory that was allocated under the saver, whoever holds it.

    In a process that was started without `preload_env` the contexts do nothing and `pause` raises RuntimeError.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._enabled = os.environ.get(_ENABLE) == "1"
        self._paused = False

    @property
    def paused(self) -> bool:
        return self._paused

    @contextlib.contextmanager
    def region(self, tag: str = "default") -> Iterator[None]:
        with _saver().region(tag=tag, enable_cpu_backup=True) if self._enabled else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def disable(self) -> Iterator[None]:
        with _saver().disable() if self._enabled else contextlib.nullcontext():
            yield

    def pause(self, model_chunks: Sequence[Any], optimizer: Any = None) -> int:
        if self._paused:
            raise RuntimeError("the trainer's memory is paused already")
        if not self._enabled:
            raise RuntimeError(f"this process was started without torch_memory_saver ({_ENABLE}=1 and its LD_PRELOAD)")
        self._accelerator.synchronize()
        self._accelerator.empty_cache()
        free_before, _ = self._accelerator.mem_get_info()
        _saver().pause()
        self._paused = True
        return self._accelerator.mem_get_info()[0] - free_before

    def resume(self) -> int:
        if not self._paused:
            raise RuntimeError("the trainer's memory is not paused")
        free_before, _ = self._accelerator.mem_get_info()
        _saver().resume()
        self._paused = False
        return free_before - self._accelerator.mem_get_info()[0]


def _saver() -> Any:
    from torch_memory_saver import torch_memory_saver

    return torch_memory_saver
