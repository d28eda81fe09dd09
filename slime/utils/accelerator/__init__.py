"""The one place that knows devices: `current()` answers for the CPU, CUDA or Ascend."""

from __future__ import annotations

from slime.utils.accelerator.base import Accelerator
from slime.utils.accelerator.registry import accelerator_names, current, register_accelerator, set_current

get_accelerator = current

__all__ = ["Accelerator", "accelerator_names", "current", "get_accelerator", "register_accelerator", "set_current"]
