"""NVIDIA GPUs (and AMD's, which torch also calls cuda): Ray's `GPU`, NCCL, torch_memory_saver."""

from __future__ import annotations

import importlib.util
import os
import sys
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from slime.utils.accelerator.torch_device import TorchDeviceAccelerator

if TYPE_CHECKING:
    from slime.backends.megatron_utils.modules.delta_rule import DeltaRuleKernels
    from slime.utils.accelerator.memory_saver import MemorySaver


_DEVICE_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # NVIDIA, AMD, Windows' Linux subsystem


class CudaAccelerator(TorchDeviceAccelerator):
    """Trainers start with torch_memory_saver preloaded when they are to be offloaded."""

    name = "cuda"
    ray_resource = "GPU"
    visible_devices_env = "CUDA_VISIBLE_DEVICES"
    collective_backend = "nccl"
    weight_update_backend = "nccl"
    default_dtype = "bfloat16"

    def is_available(self) -> bool:
        # The driver asks this before anything needs torch, whose import takes a second.
        if "torch" not in sys.modules and sys.platform == "linux" and not any(map(os.path.exists, _DEVICE_FILES)):
            return False
        import torch

        return torch.cuda.is_available()

    def ipc_collect(self) -> None:
        self._module().ipc_collect()

    def actor_options(self, fraction: float) -> dict[str, Any]:
        return {"num_gpus": fraction, "num_cpus": fraction}

    def assigned_device_ids(self) -> list[int]:
        import ray

        return [int(i) for i in ray.get_gpu_ids()]

    def noset_visible_devices_env(self) -> dict[str, str]:
        return {
            "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
            "RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES": "1",
            "RAY_EXPERIMENTAL_NOSET_ROCR_VISIBLE_DEVICES": "1",
        }

    def trainer_env(self, args: Namespace) -> dict[str, str]:
        env = {
            "NCCL_CUMEM_ENABLE": "0",  # NCCL's own virtual memory can't be paused
            "CUDA_DEVICE_MAX_CONNECTIONS": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "1"),
            "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1",
        }
        if getattr(args, "deterministic_mode", False):
            env |= {
                "NCCL_ALGO": os.environ.get("NCCL_ALGO", "Ring"),
                "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
                "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
            }
        if getattr(args, "offload_train", False):
            from slime.utils.accelerator.torch_memory_saver import preload_env

            env |= preload_env()
        return env

    def engine_env(self) -> dict[str, str]:
        return {"NCCL_CUMEM_ENABLE": "0"}

    def engine_server_args(self) -> dict[str, Any]:
        return {"device": "cuda"}

    def megatron_config_overrides(self) -> dict[str, Any]:
        """Megatron's local modules where Transformer Engine is not installed."""
        return {} if importlib.util.find_spec("transformer_engine") else {"transformer_impl": "local"}

    def delta_rule_kernels(self, backend: str) -> DeltaRuleKernels:
        if backend == "torch":
            return super().delta_rule_kernels(backend)
        from slime.backends.megatron_utils.modules.delta_rule_fla import fla_kernels

        return fla_kernels()

    def _make_memory_saver(self) -> MemorySaver:
        from slime.utils.accelerator.torch_memory_saver import TorchMemorySaver

        return TorchMemorySaver(self)
