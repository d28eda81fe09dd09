"""Kinds of layers that a model has: what they need of each other and of tensor parallelism."""

from __future__ import annotations

from slime.utils.arguments.hf_facts import TEXT_OF_VISION_MODELS
from slime.utils.arguments.rules.context import Context
from slime.utils.arguments.rules.loading import is_hf_checkpoint, read_hf_config
from slime_plugins.models import find_model_plugin


def check_layers(context: Context) -> None:
    """Gated attention, gated delta nets and norms over all heads; inputs that the trainer's models don't take."""
    args = context.args
    tensor, groups = args.tensor_model_parallel_size, args.num_query_groups
    if args.attention_output_gate and groups and tensor > groups:
        context.problems.add(
            f"--attention-output-gate needs --tensor-model-parallel-size of at most the {groups} query groups, not "
            f"{tensor}: megatron-core 0.16.1 does not cut the gates further"
        )
    context.require(
        args.qk_layernorm or not args.qk_layernorm_over_heads,
        f"{context.name('qk_layernorm_over_heads')} needs {context.name('qk_layernorm')}",
    )
    _check_linear_attention(context)
    _check_vision(context)
    context.require(
        not args.multimodal_keys,
        "--multimodal-keys: the trainer holds text models, it can't train on images, video or audio (a vision tower "
        "stays as it is in --hf-checkpoint); --debug-rollout-only takes them",
    )


def _check_linear_attention(context: Context) -> None:
    args = context.args
    frequency = context.name("linear_attention_freq")
    if args.experimental_attention_variant != "gated_delta_net":
        context.require(
            args.linear_attention_freq is None, f"{frequency} needs --experimental-attention-variant gated_delta_net"
        )
        return
    context.require(args.linear_attention_freq, f"--experimental-attention-variant gated_delta_net needs {frequency}")
    keys, values = args.linear_num_key_heads, args.linear_num_value_heads
    tensor = args.tensor_model_parallel_size
    context.require(
        keys % tensor == 0,
        f"--linear-num-key-heads {keys} is not a multiple of --tensor-model-parallel-size {tensor}",
    )
    context.require(
        values % keys == 0, f"--linear-num-value-heads {values} is not a multiple of --linear-num-key-heads {keys}"
    )


def _check_vision(context: Context) -> None:
    """A model that sees needs a weight table that says where its text model is and what becomes of the rest."""
    checkpoint = context.args.hf_checkpoint
    config = read_hf_config(checkpoint) if is_hf_checkpoint(checkpoint) else {}
    kind = config.get("model_type", "")
    if "vision_config" in config and kind not in TEXT_OF_VISION_MODELS and find_model_plugin(kind) is None:
        context.problems.add(
            f"{checkpoint} is a {kind} with a vision tower, which has no weight table; of models that see, the text "
            f"models of {' and '.join(sorted(TEXT_OF_VISION_MODELS))} can be trained"
        )
