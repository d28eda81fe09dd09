"""The platform that SGLang runs on here: plain PyTorch operators, gloo, no graphs, no custom kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

if TYPE_CHECKING:
    import torch


class PlainCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """SGLang's own CPU device operations without its AMX kernels; written for sglang 0.5.23."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def is_pin_memory_available(self, device: torch.device | None = None) -> bool:
        return False

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> Any:
        import torch

        return torch.profiler.ProfilerActivity.CPU
