"""The CPU as a device: a Ray `CPU` per rank, gloo for every group, float32 by default."""

from __future__ import annotations

import os
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from slime.utils.accelerator.base import Accelerator

if TYPE_CHECKING:
    import torch
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    from slime.utils.accelerator.memory_saver import MemorySaver


class CpuAccelerator(Accelerator):
    """Always available. Devices have no ids: placement numbers a node's bundles instead."""

    name = "cpu"
    ray_resource = "CPU"
    visible_devices_env = None
    collective_backend = "gloo"
    weight_update_backend = "gloo"
    default_dtype = "float32"

    def is_available(self) -> bool:
        return True

    def device(self, index: int | None = None) -> torch.device:
        import torch

        return torch.device("cpu")

    def set_device(self, index: int) -> None:
        return

    def device_count(self) -> int:
        """Cores that this process may run on."""
        return len(os.sched_getaffinity(0))

    def synchronize(self) -> None:
        return

    def empty_cache(self) -> None:
        from slime.utils.memory_utils import trim_heap

        trim_heap()

    def memory_allocated(self) -> int:
        """Resident bytes of this process."""
        from slime.utils.memory_utils import resident_bytes

        return resident_bytes()

    def mem_get_info(self) -> tuple[int, int]:
        import psutil

        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def manual_seed(self, seed: int) -> None:
        import torch

        torch.manual_seed(seed)

    def get_rng_state(self) -> torch.Tensor:
        import torch

        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        import torch

        torch.set_rng_state(state)

    def bundle(self) -> dict[str, float]:
        return {"CPU": 1.0}

    def actor_options(self, fraction: float) -> dict[str, Any]:
        return {"num_cpus": fraction}

    def assigned_device_ids(self) -> list[int]:
        return []

    def noset_visible_devices_env(self) -> dict[str, str]:
        return {}

    def trainer_env(self, args: Namespace) -> dict[str, str]:
        """Threads: the node's cores shared out among its trainers, unless OMP_NUM_THREADS says otherwise.

        Without it Ray would set one thread for an actor with a fraction of a CPU.
        """
        share = max(1, self.device_count() // max(1, args.actor_num_gpus_per_node))
        return _openmp_env(share)

    def engine_env(self) -> dict[str, str]:
        """Select slime's SGLang platform; without the crash-dump switches a crashed scheduler lingers for a minute."""
        return {
            "SGLANG_PLATFORM": "slime_cpu",  # the entry point in pyproject.toml
            "SGLANG_USE_CPU_ENGINE": "0",  # SGLang's own CPU engine needs AMX kernels that PyPI does not have
            "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
            "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
            **_openmp_env(threads=1),
        }

    def engine_server_args(self) -> dict[str, Any]:
        return {
            "device": "cpu",
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "grammar_backend": "none",
            "disable_cuda_graph": True,
            "disable_overlap_schedule": True,
            "skip_server_warmup": True,
            "sleep_on_idle": True,  # else an idle scheduler takes a core
            "dtype": self.default_dtype,
            "max_total_tokens": 16384,  # the KV cache's size is not measured on a CPU
            "max_running_requests": 64,
        }

    def prepare_megatron(self) -> None:
        from slime.backends.megatron_utils.cpu import import_hook

        import_hook.install()

    def megatron_config_overrides(self) -> dict[str, Any]:
        """No fused kernels, weights initialised on the host, and a dispatcher that takes variable lengths."""
        return {
            "use_cpu_initialization": True,
            "transformer_impl": "local",
            "persist_layer_norm": False,
            "bias_activation_fusion": False,
            "bias_dropout_fusion": False,
            "masked_softmax_fusion": False,
            "apply_rope_fusion": False,
            "gradient_accumulation_fusion": False,
            "cross_entropy_loss_fusion": False,
            "moe_grouped_gemm": False,
            "moe_permute_fusion": False,
            "moe_router_fusion": False,
            "moe_shared_expert_overlap": False,
            "moe_token_dispatcher_type": "alltoall",
        }

    def layer_spec(self, config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
        from slime.backends.megatron_utils.cpu.layer_spec import cpu_decoder_block_spec

        return cpu_decoder_block_spec(config, vp_stage)

    def _make_memory_saver(self) -> MemorySaver:
        from slime.utils.accelerator.file_memory_saver import FileMemorySaver

        return FileMemorySaver()


def _openmp_env(threads: int) -> dict[str, str]:
    """Threads of a process, which wait without spinning; the user's own settings win.

    Spinning threads starve each other where more run than there are cores: a training step of a tiny model took 7.4 s
    instead of 0.07 s on two busy cores.
    """
    defaults = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    return {name: os.environ.get(name, value) for name, value in defaults.items()}
