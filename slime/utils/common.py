"""Facts about this machine that plug-ins ask for."""

from __future__ import annotations

import importlib.util


def is_npu() -> bool:
    """Whether Ascend NPUs can be used: torch_npu is installed and finds one. Imports it only where it is installed.

    Never raises: a torch_npu that can't be imported (no driver) means no NPU.
    """
    if importlib.util.find_spec("torch_npu") is None:
        return False
    import torch

    try:
        import torch_npu  # noqa: F401
    except (ImportError, OSError, RuntimeError):  # its shared libraries need the driver
        return False
    return bool(torch.npu.is_available())
