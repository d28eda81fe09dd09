"""From the parsed namespace to megatron-core's config objects.

Written for megatron-core 0.16.1. Every config field is copied from the namespace attribute of the same meaning
(`slime.utils.arguments.megatron_names`); what Megatron-LM derives from other flags is derived here; what the device
can't do is taken from the accelerator last.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from slime.utils.accelerator import current
from slime.utils.arguments.hf_facts import config_from_hf
from slime.utils.arguments.megatron_names import attribute_of

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

__all__ = [
    "config_from_hf",
    "ddp_config_from_args",
    "optimizer_config_from_args",
    "transformer_config_from_args",
]

_DTYPE_FIELDS = ("params_dtype", "main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
_DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "uint8"}
# flags that take one value or one per layer / per loss, as Megatron-LM's command line does
_ONE_OR_MANY = ("cp_comm_type", "moe_aux_loss_coeff", "moe_router_load_balancing_type")


def transformer_config_from_args(args: argparse.Namespace, **overrides: Any) -> TransformerConfig:
    """The model's config: `MLATransformerConfig` with `--multi-latent-attention`, else `TransformerConfig`.

    `overrides` are config fields that win over everything, the device's needs included (for instance another
    `num_layers` for a critic).
    """
    current().prepare_megatron()
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    config_class = MLATransformerConfig if getattr(args, "multi_latent_attention", False) else TransformerConfig
    values = _fields_from_args(config_class, args)
    values.update(_derived_model_fields(args))
    known = {field.name for field in dataclasses.fields(config_class)}
    values.update({name: value for name, value in current().megatron_config_overrides().items() if name in known})
    values.update(overrides)
    return config_class(**values)


def optimizer_config_from_args(args: argparse.Namespace) -> OptimizerConfig:
    """The optimiser's config; the distributed optimiser is always on."""
    current().prepare_megatron()
    from megatron.core.optimizer import OptimizerConfig

    values = _fields_from_args(OptimizerConfig, args)
    values["use_distributed_optimizer"] = True
    if values.get("min_lr") is None:
        values["min_lr"] = 0.0  # the scheduler compares with it
    return OptimizerConfig(**values)


def ddp_config_from_args(args: argparse.Namespace) -> DistributedDataParallelConfig:
    """The data-parallel wrapper's config; bf16 models reduce gradients in float32 unless the user said otherwise."""
    current().prepare_megatron()
    from megatron.core.distributed import DistributedDataParallelConfig

    values = _fields_from_args(DistributedDataParallelConfig, args)
    values["use_distributed_optimizer"] = True
    return DistributedDataParallelConfig(**values)


def _fields_from_args(config_class: type, args: argparse.Namespace) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config_class):
        attribute = attribute_of(field.name)
        if hasattr(args, attribute):
            values[field.name] = _config_value(field.name, getattr(args, attribute))
    return values


def _config_value(field: str, value: Any) -> Any:
    if field in _DTYPE_FIELDS and isinstance(value, str):
        return _torch_dtype(value)
    if field == "attention_backend" and isinstance(value, str):
        from megatron.core.transformer.enums import AttnBackend

        return AttnBackend[value]
    if field in _ONE_OR_MANY and isinstance(value, list) and len(value) == 1:
        return value[0]
    return value


def _torch_dtype(name: str) -> Any:
    import torch

    return getattr(torch, _DTYPE_NAMES.get(name, name))


def _derived_model_fields(args: argparse.Namespace) -> dict[str, Any]:
    """What Megatron-LM works out from other flags instead of copying it."""
    # Interleaved stages with batched p2p give wrong gradients, so the two go together.
    overlap_p2p = getattr(args, "virtual_pipeline_model_parallel_size", None) is not None
    derived = {
        **_activation_fields(args),
        "variable_seq_lengths": True,
        # Overlapped sends are still reading an output when Megatron frees its storage: gradients were wrong at random.
        "deallocate_pipeline_outputs": not overlap_p2p,
        "overlap_p2p_comm": overlap_p2p,
        "batch_p2p_comm": not overlap_p2p,
    }
    if hasattr(args, "params_dtype"):
        derived["pipeline_dtype"] = _config_value("params_dtype", args.params_dtype)
    if not getattr(args, "group_query_attention", True):
        derived["num_query_groups"] = None
    if getattr(args, "num_experts", None) is None:
        derived["moe_layer_freq"] = 1
    if getattr(args, "experimental_attention_variant", None) == "gated_delta_net":
        derived["experimental_attention_variant"] = None  # Megatron's refuses context parallelism, slime's does not
    if getattr(args, "multi_latent_attention", False) and getattr(args, "rope_type", None) is None:
        derived["rope_type"] = "yarn"
    return derived


def _activation_fields(args: argparse.Namespace) -> dict[str, Any]:
    import torch.nn.functional as F

    if getattr(args, "swiglu", False):
        fusion = getattr(args, "bias_swiglu_fusion", True)
        return {"activation_func": F.silu, "gated_linear_unit": True, "bias_activation_fusion": fusion}
    if getattr(args, "quick_geglu", False):
        from megatron.core.fusions.fused_bias_geglu import quick_gelu

        return {"activation_func": quick_gelu, "gated_linear_unit": True, "bias_activation_fusion": False}
    if getattr(args, "squared_relu", False):
        from megatron.core.activations import squared_relu

        return {"activation_func": squared_relu, "bias_activation_fusion": False}
    fusion = getattr(args, "bias_gelu_fusion", True) and getattr(args, "add_bias_linear", True)
    return {"activation_func": F.gelu, "bias_activation_fusion": fusion}
