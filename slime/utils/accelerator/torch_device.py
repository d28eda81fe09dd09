"""What devices with a torch device module (torch.cuda, torch.npu) have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slime.utils.accelerator.base import Accelerator

if TYPE_CHECKING:
    import torch


class TorchDeviceAccelerator(Accelerator):
    """Answers from `torch.<name>`."""

    def _module(self) -> Any:
        import torch

        return getattr(torch, self.name)

    def device(self, index: int | None = None) -> torch.device:
        import torch

        return torch.device(self.name, self._module().current_device() if index is None else index)

    def set_device(self, index: int) -> None:
        self._module().set_device(index)

    def device_count(self) -> int:
        return self._module().device_count()

    def synchronize(self) -> None:
        self._module().synchronize()

    def empty_cache(self) -> None:
        self._module().empty_cache()

    def memory_allocated(self) -> int:
        return self._module().memory_allocated()

    def mem_get_info(self) -> tuple[int, int]:
        return self._module().mem_get_info()

    def manual_seed(self, seed: int) -> None:
        self._module().manual_seed(seed)

    def get_rng_state(self) -> torch.Tensor:
        return self._module().get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        self._module().set_rng_state(state)

    def bundle(self) -> dict[str, float]:
        return {self.ray_resource: 1.0, "CPU": 1.0}
