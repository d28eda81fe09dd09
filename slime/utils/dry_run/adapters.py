"""How many adapter parameters (LoRA) a training rank holds; `lora.parallel` says how they are cut."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass

from slime.utils.arguments.groups.lora import ALL_LINEAR, EXPERTS
from slime.utils.arguments.hf_facts import linear_attention_pattern
from slime.utils.arguments.rules.loading import read_hf_config
from slime.utils.dry_run.parameters import ParameterCount, expert_pattern, layers_of_stage

# model types whose checkpoints hold gate and up in one matrix
_FUSED_GATE_UP = ("glm4",)


@dataclass(frozen=True)
class _Linear:
    """A linear layer of the checkpoint: its names there and in Megatron, its whole size, whether outputs are cut."""

    name: str
    module: str
    inputs: int
    outputs: int
    column: bool


def count_rank_adapters(args: Namespace, stage: int) -> ParameterCount:
    """Adapter parameters of a rank in pipeline stage `stage`; zero without `--lora-rank`."""
    total = ParameterCount(0, 0)
    if args.lora_rank is None:
        return total
    experts, linear = expert_pattern(args), linear_attention_pattern(args.linear_attention_freq, args.num_layers)
    for layer in layers_of_stage(args, stage):
        mixer = _gated_delta_net(args) if linear[layer] else _attention(args)
        total += ParameterCount(sum(_dense_pair(args, linear) for linear in mixer), 0)
        total += _expert_layer(args) if experts[layer] else _dense_mlp(args, args.ffn_hidden_size)
    return total


def _dense_mlp(args: Namespace, width: int) -> ParameterCount:
    return ParameterCount(sum(_dense_pair(args, linear) for linear in _mlp(args, width)), 0)


def _expert_layer(args: Namespace) -> ParameterCount:
    shared = args.moe_shared_expert_intermediate_size
    dense = _dense_mlp(args, shared) if shared else ParameterCount(0, 0)
    linears = _mlp(args, args.moe_ffn_hidden_size or args.ffn_hidden_size)
    one = sum(_expert_pair(args, linear) for linear in linears)
    return dense + ParameterCount(0, one * (args.num_experts // args.expert_model_parallel_size))


def _attention(args: Namespace) -> Iterator[_Linear]:
    hidden, heads, width = args.hidden_size, args.num_attention_heads, args.kv_channels
    if args.multi_latent_attention:
        queries, values = heads * (args.qk_head_dim + args.qk_pos_emb_head_dim), heads * args.v_head_dim
        if args.q_lora_rank is None:
            yield _Linear("q_proj", "linear_q_proj", hidden, queries, True)
        else:
            yield _Linear("q_b_proj", "linear_q_up_proj", args.q_lora_rank, queries, True)
        yield _Linear("kv_b_proj", "linear_kv_up_proj", args.kv_lora_rank, heads * args.qk_head_dim + values, True)
        yield _Linear("o_proj", "linear_proj", values, hidden, False)
        return
    queries = heads * (2 if args.attention_output_gate else 1)
    for name, outputs in (("q_proj", queries), ("k_proj", args.num_query_groups), ("v_proj", args.num_query_groups)):
        yield _Linear(name, "linear_qkv", hidden, outputs * width, True)
    yield _Linear("o_proj", "linear_proj", heads * width, hidden, False)


def _gated_delta_net(args: Namespace) -> Iterator[_Linear]:
    """Queries, keys, values, output gates, step sizes and decays; Qwen3-Next has them in two matrices, Qwen3.5 in
    four."""
    hidden, values = args.hidden_size, args.linear_num_value_heads
    width = values * args.linear_value_head_dim
    mixed = 2 * args.linear_num_key_heads * args.linear_key_head_dim + width
    if read_hf_config(args.hf_checkpoint).get("model_type") == "qwen3_next":
        parts = {"in_proj_qkvz": mixed + width, "in_proj_ba": 2 * values}
    else:
        parts = {"in_proj_qkv": mixed, "in_proj_z": width, "in_proj_b": values, "in_proj_a": values}
    for name, outputs in parts.items():
        yield _Linear(name, "in_proj", hidden, outputs, True)
    yield _Linear("out_proj", "out_proj", width, hidden, False)


def _mlp(args: Namespace, width: int) -> list[_Linear]:
    if read_hf_config(args.hf_checkpoint).get("model_type") in _FUSED_GATE_UP:
        up = [_Linear("gate_up_proj", "linear_fc1", args.hidden_size, 2 * width, True)]
    else:
        up = [_Linear(name, "linear_fc1", args.hidden_size, width, True) for name in ("gate_proj", "up_proj")]
    return [*up, _Linear("down_proj", "linear_fc2", width, args.hidden_size, False)]


def _dense_pair(args: Namespace, linear: _Linear) -> int:
    """The side of the layer that tensor-parallel ranks share is cut, the other whole."""
    if not {ALL_LINEAR, linear.name, linear.module} & set(args.lora_targets):
        return 0
    tensor = args.tensor_model_parallel_size
    if linear.column:
        return args.lora_rank * (linear.inputs + linear.outputs // tensor)
    return args.lora_rank * (linear.inputs // tensor + linear.outputs)


def _expert_pair(args: Namespace, linear: _Linear) -> int:
    """Both are cut."""
    if not {ALL_LINEAR, EXPERTS, linear.name, linear.module} & set(args.lora_targets):
        return 0
    return args.lora_rank * (linear.inputs + linear.outputs) // args.expert_tensor_parallel_size
