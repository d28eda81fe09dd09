"""Kinds of layers that a model has: what they need of each other and of tensor parallelism."""

from __future__ import annotations

from slime.utils.arguments.rules.context import Context


def check_layers(context: Context) -> None:
    """Gated attention, gated delta nets and norms over all heads."""
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
