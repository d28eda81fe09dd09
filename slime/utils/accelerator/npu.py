"""Ascend NPUs: Ray's custom resource `NPU`, HCCL, and MindSpeed's adaptor in front of megatron-core."""

from __future__ import annotations

import os
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from slime.utils.accelerator.torch_device import TorchDeviceAccelerator
from slime.utils.common import is_npu

if TYPE_CHECKING:
    from slime.utils.accelerator.memory_saver import MemorySaver


class NpuAccelerator(TorchDeviceAccelerator):
    """Needs torch_npu, and mindspeed for training."""

    name = "npu"
    ray_resource = "NPU"
    visible_devices_env = "ASCEND_RT_VISIBLE_DEVICES"
    collective_backend = "hccl"
    weight_update_backend = "hccl"
    default_dtype = "bfloat16"

    def is_available(self) -> bool:
        return is_npu()

    def actor_options(self, fraction: float) -> dict[str, Any]:
        return {"resources": {"NPU": fraction}, "num_cpus": fraction}

    def assigned_device_ids(self) -> list[int]:
        import ray

        # Ray gives these ids as text.
        return [int(i) for i in ray.get_runtime_context().get_accelerator_ids().get("NPU", [])]

    def noset_visible_devices_env(self) -> dict[str, str]:
        return {"RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES": "1"}

    def trainer_env(self, args: Namespace) -> dict[str, str]:
        env = {
            # Two disjoint ranges, so that trainers and engines on one host don't meet.
            "HCCL_HOST_SOCKET_PORT_RANGE": os.environ.get("HCCL_HOST_SOCKET_PORT_RANGE", "60000-60050"),
            "HCCL_NPU_SOCKET_PORT_RANGE": os.environ.get("HCCL_NPU_SOCKET_PORT_RANGE", "61000-61050"),
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron checks it on every device
        }
        if getattr(args, "deterministic_mode", False):
            env |= {"HCCL_DETERMINISTIC": "true", "LCCL_DETERMINISTIC": "1"}
        if getattr(args, "offload_train", False):
            from slime.utils.accelerator.torch_memory_saver import preload_env

            env |= preload_env()
        return env

    def engine_env(self) -> dict[str, str]:
        return {}

    def engine_server_args(self) -> dict[str, Any]:
        return {"device": "npu", "attention_backend": "ascend"}

    def prepare_megatron(self) -> None:
        """MindSpeed replaces what Megatron hard-codes for CUDA; importing its adaptor does it."""
        import mindspeed.megatron_adaptor  # noqa: F401

    def after_megatron_init(self, args: Namespace) -> None:
        """MindSpeed's patches depend on the arguments, which its adaptor could not know when it was imported."""
        from mindspeed.megatron_adaptor import repatch

        repatch(vars(args))

    def _make_memory_saver(self) -> MemorySaver:
        from slime.utils.accelerator.torch_memory_saver import TorchMemorySaver

        return TorchMemorySaver(self)
