"""What slime needs to know about a kind of device; nothing outside this package names one."""

from __future__ import annotations

import abc
import functools
import os
from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    from slime.backends.megatron_utils.modules.delta_rule import DeltaRuleKernels
    from slime.utils.accelerator.memory_saver import MemorySaver


class Accelerator(abc.ABC):
    """One kind of device: its torch device, Ray resource, collectives, memory saver, and preparation of Megatron.

    Methods that touch torch or Megatron import them when called, so that the driver need not load them.
    """

    name: str
    ray_resource: str
    visible_devices_env: str | None
    collective_backend: str
    weight_update_backend: str
    default_dtype: str

    # -- torch device ------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def is_available(self) -> bool:
        """Whether this process could use such a device."""

    @abc.abstractmethod
    def device(self, index: int | None = None) -> torch.device:
        """The torch device with this index; the current one without."""

    @abc.abstractmethod
    def set_device(self, index: int) -> None:
        """Make a device of this process the current one."""

    @abc.abstractmethod
    def device_count(self) -> int:
        """Devices that this process sees."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Wait for everything that was started on the current device."""

    @abc.abstractmethod
    def empty_cache(self) -> None:
        """Give memory that allocators hold but nothing uses back to the system."""

    @abc.abstractmethod
    def memory_allocated(self) -> int:
        """Bytes that this process has in use on the current device."""

    @abc.abstractmethod
    def mem_get_info(self) -> tuple[int, int]:
        """(free, total) bytes of the current device."""

    @abc.abstractmethod
    def manual_seed(self, seed: int) -> None:
        """Seed the device's random generator."""

    @abc.abstractmethod
    def get_rng_state(self) -> torch.Tensor:
        """State of the device's random generator."""

    @abc.abstractmethod
    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restore what `get_rng_state` returned."""

    def ipc_collect(self) -> None:
        """Release memory of tensors that other processes have finished reading."""
        return

    # -- Ray ---------------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def bundle(self) -> dict[str, float]:
        """Resources of a placement-group bundle that holds one device."""

    @abc.abstractmethod
    def actor_options(self, fraction: float) -> dict[str, Any]:
        """Keyword arguments of `ActorClass.options` for an actor on a fraction of one device."""

    @abc.abstractmethod
    def assigned_device_ids(self) -> list[int]:
        """Ids of the devices that Ray assigned to this worker; empty where devices have no ids."""

    @abc.abstractmethod
    def noset_visible_devices_env(self) -> dict[str, str]:
        """Environment that keeps Ray from narrowing the visible devices of an actor."""

    def local_index(self, device_id: int, env: Mapping[str, str] = os.environ) -> int:
        """Index in this process of the device with this id on the node: its place among the visible devices.

        Raises:
            ValueError: the device is not visible here.
        """
        visible = env.get(self.visible_devices_env) if self.visible_devices_env else None
        if not visible:
            return device_id
        ids = [int(part) for part in visible.split(",")]
        if device_id not in ids:
            raise ValueError(f"{self.name} device {device_id} is not among {self.visible_devices_env}={visible}")
        return ids.index(device_id)

    # -- processes ---------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def trainer_env(self, args: Namespace) -> dict[str, str]:
        """Environment that training actors need before they start."""

    @abc.abstractmethod
    def engine_env(self) -> dict[str, str]:
        """Environment that an SGLang server needs before it starts."""

    @abc.abstractmethod
    def engine_server_args(self) -> dict[str, Any]:
        """`ServerArgs` fields that an SGLang server needs on this device; the user's `--sglang-*` win over them."""

    # -- Megatron ----------------------------------------------------------------------------------------------------

    def prepare_megatron(self) -> None:
        """Make megatron-core ready for this device; call before the first `import megatron.core`. Idempotent."""
        return

    def after_megatron_init(self, args: Namespace) -> None:
        """What must follow Megatron's initialisation and precede the building of a model."""
        return

    def megatron_config_overrides(self) -> dict[str, Any]:
        """`TransformerConfig` fields that this device forces."""
        return {}

    def layer_spec(self, config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
        """Spec of this pipeline stage's decoder block, with modules that run on this device."""
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

        return get_gpt_decoder_block_spec(
            config,
            use_transformer_engine=config.transformer_impl == "transformer_engine",
            normalization=config.normalization,
            vp_stage=vp_stage,
        )

    def delta_rule_kernels(self, backend: str) -> DeltaRuleKernels:
        """The kernels of gated delta net layers: those that `--qwen-gdn-backend` names, where the device has them."""
        from slime.backends.megatron_utils.modules.delta_rule import TORCH_KERNELS

        return TORCH_KERNELS

    def memory_saver(self) -> MemorySaver:
        """The saver that takes the trainer's weights, gradients and optimizer state off the device and back.

        One per accelerator: `resume` must meet the saver that paused.
        """
        return self._memory_saver

    @functools.cached_property
    def _memory_saver(self) -> MemorySaver:
        return self._make_memory_saver()

    @abc.abstractmethod
    def _make_memory_saver(self) -> MemorySaver: ...
