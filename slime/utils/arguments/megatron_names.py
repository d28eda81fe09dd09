"""How megatron-core's config fields are called on the command line and on the parsed namespace.

Written for megatron-core 0.16.1. megatron-core names a field (`layernorm_epsilon`); Megatron-LM's command line gives
some of them another flag, attribute or default. What isn't listed here keeps the field's name: `--layernorm-epsilon`
style flag, same attribute, same default.
"""

from __future__ import annotations

import ast
from typing import Any

from slime.utils.arguments.source import Unreadable, literal

# config field -> attribute on the parsed namespace (Megatron-LM's name)
ATTRIBUTE_OF_FIELD: dict[str, str] = {
    "layernorm_epsilon": "norm_epsilon",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
    "num_moe_experts": "num_experts",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "fp8_param": "fp8_param_gather",
    "fp4_param": "fp4_param_gather",
    "use_te_rng_tracker": "te_rng_tracker",
    "grad_reduce_in_fp32": "accumulate_allreduce_grads_in_fp32",
    "check_for_nan_in_grad": "check_for_nan_in_loss_and_grad",
    "bucket_size": "ddp_bucket_size",
    "average_in_collective": "ddp_average_in_collective",
    "pad_buckets_for_high_nccl_busbw": "ddp_pad_buckets_for_high_nccl_busbw",
    "reduce_scatter_with_fp32_accumulation": "ddp_reduce_scatter_with_fp32_accumulation",
}

# config fields that no flag sets: objects that the trainer fills in, values derived from other flags, deprecated ones
FIELDS_WITHOUT_FLAG: frozenset[str] = frozenset(
    {
        "_cpu_offloading_context",
        "activation_func",  # --swiglu, --squared-relu, --quick-geglu
        "async_tensor_model_parallel_allreduce",
        "autocast_dtype",
        "barrier_with_L1_time",  # without Megatron's timers it does nothing
        "batch_p2p_comm",  # the opposite of overlap_p2p_comm
        "bias_activation_fusion",  # --no-bias-swiglu-fusion, --no-bias-gelu-fusion
        "deallocate_pipeline_outputs",
        "embedding_init_method",
        "enable_autocast",
        "enable_cuda_graph",
        "external_cuda_graph",
        "finalize_model_grads_func",
        "gated_linear_unit",  # --swiglu
        "grad_scale_func",
        "grad_sync_func",
        "init_method",
        "is_hybrid_model",
        "moe_extended_tp",
        "mtp_standalone",
        "no_sync_func",
        "output_layer_init_method",
        "param_sync_func",
        "params_dtype",  # --bf16, --fp16, --fp32
        "pipeline_dtype",
        "quant_recipe",
        "test_mode",
        "timers",
        "use_custom_fsdp",
        "use_distributed_optimizer",  # always on
        "variable_seq_lengths",  # always on
    }
)

# attribute -> flags, where they differ from --<attribute-with-dashes>; "--no-"/"--disable-" ones store False
FLAGS_OF_ATTRIBUTE: dict[str, tuple[str, ...]] = {
    "add_bias_linear": ("--disable-bias-linear",),
    "apply_rope_fusion": ("--no-rope-fusion", "--rope-fusion"),
    "barrier_with_L1_time": ("--no-barrier-with-level-1-timing",),
    "fp8": ("--fp8-format",),
    "fp4": ("--fp4-format",),
    "microbatch_group_size_per_vp_stage": ("--microbatch-group-size-per-virtual-pipeline-stage",),
    "overlap_p2p_comm": ("--overlap-p2p-communication", "--no-overlap-p2p-communication"),
    "overlap_p2p_comm_warmup_flush": ("--overlap-p2p-communication-warmup-flush",),
    "perform_initialization": ("--no-initialization",),
    "use_mamba_mem_eff_path": ("--disable-mamba-mem-eff-path",),
    "fp8_wgrad": ("--no-fp8-wgrad", "--fp8-wgrad"),
}

# attribute -> default of the command line, where it isn't the config field's. Megatron-LM switches the fusions on;
# a gradient that isn't finite skips its step instead of ending the run (`optimizer_step`);
# slime packs sequences of different lengths, which the allgather dispatcher refuses, even for dense models.
DEFAULT_OF_ATTRIBUTE: dict[str, Any] = {
    "num_layers": None,
    "hidden_size": None,
    "num_attention_heads": None,
    "apply_rope_fusion": True,
    "bias_dropout_fusion": True,
    "check_for_nan_in_loss_and_grad": False,
    "cuda_graph_scope": None,  # the whole layer, which the config's own default spells in a deprecated way
    "gradient_accumulation_fusion": True,
    "masked_softmax_fusion": True,
    "min_lr": 0.0,
    "optimizer_offload_fraction": 1.0,
    "moe_token_dispatcher_type": "alltoall",
    "mtp_loss_scaling_factor": 0.2,
    "multi_latent_attention": False,
    "normalization": "LayerNorm",
    "overlap_p2p_comm": None,
    "persist_layer_norm": True,
    "q_lora_rank": None,
    "rope_type": None,
    "lr": 1e-6,
}


def attribute_of(field: str) -> str:
    """The namespace attribute that holds megatron-core's config field `field`."""
    return ATTRIBUTE_OF_FIELD.get(field, field)


def layer_pattern(text: str) -> int | list[int]:
    """An integer, or a list per layer such as `([0]*3+[1]*61)*1`, with or without quotes around it.

    Raises:
        ValueError: the text has anything but integers, lists, `+`, `*` and brackets in it.
    """
    bare = text.strip().strip("'\"")
    try:
        value = literal(ast.parse(bare, mode="eval").body)
    except (SyntaxError, Unreadable, TypeError) as error:
        raise ValueError(f"expected an integer or a list like ([0]*3+[1]*61), got {text!r}") from error
    if isinstance(value, int) or (isinstance(value, list) and all(isinstance(item, int) for item in value)):
        return value
    raise ValueError(f"expected an integer or a list like ([0]*3+[1]*61), got {text!r}")


def window_size(text: str) -> tuple[int, int]:
    """Two integers, `left,right`, with or without brackets."""
    left, right = (int(part) for part in text.strip().strip("()").split(","))
    return left, right


# attribute -> (parser of one value, nargs), where the annotation doesn't say enough
TYPE_OF_ATTRIBUTE: dict[str, tuple[Any, str | None]] = {
    "cp_comm_type": (str, "+"),
    "cuda_graph_scope": (str, None),
    "linear_attention_freq": (layer_pattern, None),
    "moe_aux_loss_coeff": (float, "+"),
    "moe_layer_freq": (layer_pattern, None),
    "moe_router_load_balancing_type": (str, "+"),
    "no_rope_freq": (layer_pattern, None),
    "pipeline_model_parallel_layout": (str, None),
    "window_attn_skip_freq": (layer_pattern, None),
    "window_size": (window_size, None),
}
