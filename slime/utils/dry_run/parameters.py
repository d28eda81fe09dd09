"""How many parameters a training rank holds, as megatron-core 0.16.1 builds GPT models."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass

from slime.utils.arguments.hf_facts import expand_layer_pattern, linear_attention_pattern
from slime.utils.dry_run.vision import count_tower_parameters


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of one rank: experts apart, because fewer ranks share their optimiser state."""

    dense: int
    expert: int

    @property
    def total(self) -> int:
        return self.dense + self.expert

    def __add__(self, other: ParameterCount) -> ParameterCount:
        return ParameterCount(self.dense + other.dense, self.expert + other.expert)


def count_rank_parameters(args: Namespace, stage: int, role: str = "actor") -> ParameterCount:
    """Parameters of a rank in pipeline stage `stage`.

    Each stage has its layers; the first also the embedding and the vision tower; the last the final norm and the
    output layer, which is a copy of the embedding where the two are tied and the stage is not the first. A critic's
    has one output. Layers that predict ahead stand in the last stage and need the embedding there.
    """
    stages = args.pipeline_model_parallel_size
    total = ParameterCount(0, 0)
    experts, linear = expert_pattern(args), linear_attention_pattern(args.linear_attention_freq, args.num_layers)
    for layer in layers_of_stage(args, stage):
        total += _layer(args, has_experts=bool(experts[layer]), has_linear_attention=bool(linear[layer]))
    embedding = args.padded_vocab_size * args.hidden_size // args.tensor_model_parallel_size
    first, last = stage == 0, stage == stages - 1
    if first:
        positions = args.max_position_embeddings if args.position_embedding_type == "learned_absolute" else 0
        total += ParameterCount(embedding + positions * args.hidden_size + count_tower_parameters(args), 0)
    if last:
        own_output = args.untie_embeddings_and_output_weights or not first
        output = args.hidden_size if role == "critic" else own_output * embedding
        total += ParameterCount(_norm(args, args.hidden_size) + output, 0)
    if last and args.mtp_num_layers and role != "critic":
        last_layer = _layer(args, has_experts=bool(experts[-1]), has_linear_attention=bool(linear[-1]))
        total += _prediction_layers(args, last_layer)
        if not first and args.untie_embeddings_and_output_weights:
            total += ParameterCount(embedding, 0)
    return total


def layers_of_stage(args: Namespace, stage: int) -> list[int]:
    """Indices of a stage's layers. Interleaved stages take one chunk each in turn."""
    stages, chunks = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size or 1
    sizes = _layers_per_stage(args)
    layers: list[int] = []
    start = 0
    for _ in range(chunks):
        for owner in range(stages):
            size = sizes[owner] // chunks
            if owner == stage:
                layers += range(start, start + size)
            start += size
    return layers


def _layers_per_stage(args: Namespace) -> list[int]:
    """Uneven first and last stages are given; the rest share what is left. Embedding and loss may count as layers."""
    stages, layers = args.pipeline_model_parallel_size, args.num_layers
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    if first is None and last is None:
        embedding, loss = args.account_for_embedding_in_pipeline_split, args.account_for_loss_in_pipeline_split
        even = (layers + embedding + loss) // stages
        return [even - (embedding and stage == 0) - (loss and stage == stages - 1) for stage in range(stages)]
    inner = stages - (first is not None) - (last is not None)
    even = (layers - (first or 0) - (last or 0)) // max(inner, 1)
    sizes = [even] * stages
    if first is not None:
        sizes[0] = first
    if last is not None:
        sizes[-1] = last
    return sizes


def expert_pattern(args: Namespace) -> list[int]:
    """Per layer whether it has experts."""
    if not args.num_experts:
        return [0] * args.num_layers
    return expand_layer_pattern(args.moe_layer_freq, args.num_layers)


def _layer(args: Namespace, has_experts: bool, has_linear_attention: bool) -> ParameterCount:
    tensor = args.tensor_model_parallel_size
    norms = 2 + bool(args.post_self_attn_layernorm) + bool(args.post_mlp_layernorm)
    mixer = _gated_delta_net(args) if has_linear_attention else _attention(args)
    dense = norms * _norm(args, args.hidden_size) + sum(mixer)
    if not has_experts:
        return ParameterCount(dense + _mlp(args, args.ffn_hidden_size, tensor), 0)
    dense += args.num_experts * args.hidden_size  # the router
    shared = args.moe_shared_expert_intermediate_size
    if shared:
        dense += _mlp(args, shared, tensor) + (args.hidden_size if args.moe_shared_expert_gate else 0)
    width = args.moe_ffn_hidden_size or args.ffn_hidden_size
    local = args.num_experts // args.expert_model_parallel_size
    return ParameterCount(dense, local * _mlp(args, width, args.expert_tensor_parallel_size))


def _prediction_layers(args: Namespace, inner: ParameterCount) -> ParameterCount:
    """Multi-token prediction: a decoder layer behind a projection of two normed inputs, and a norm after it."""
    hidden = args.hidden_size
    own = 3 * _norm(args, hidden) + 2 * hidden * hidden // args.tensor_model_parallel_size
    total = ParameterCount(0, 0)
    for _ in range(args.mtp_num_layers):
        total += inner + ParameterCount(own, 0)
    return total


def _attention(args: Namespace) -> Iterator[int]:
    """The parts of self-attention, without the norm before it."""
    hidden, tensor, heads = args.hidden_size, args.tensor_model_parallel_size, args.num_attention_heads
    if args.multi_latent_attention:
        yield from _latent_attention(args)
        return
    width, groups = args.kv_channels, args.num_query_groups
    queries = heads * width * (2 if args.attention_output_gate else 1)
    projected = (queries + 2 * groups * width) // tensor
    yield hidden * projected
    if args.add_bias_linear or args.add_qkv_bias:
        yield projected
    if args.qk_layernorm:
        yield (heads + groups) * width if args.qk_layernorm_over_heads else 2 * _norm(args, width)
    yield heads * width // tensor * hidden
    if args.add_bias_linear:
        yield hidden


def _gated_delta_net(args: Namespace) -> Iterator[int]:
    """The parts of `GatedDeltaNet`, whose norm alone is not cut over tensor-parallel ranks."""
    tensor, hidden = args.tensor_model_parallel_size, args.hidden_size
    keys, values = args.linear_num_key_heads // tensor, args.linear_num_value_heads // tensor
    channels = 2 * keys * args.linear_key_head_dim + values * args.linear_value_head_dim
    projected = channels + values * (args.linear_value_head_dim + 2)
    yield hidden * projected
    if args.add_bias_linear:
        yield projected + hidden
    yield channels * args.linear_conv_kernel_dim
    yield 2 * values + args.linear_value_head_dim  # decays, step sizes, norm
    yield values * args.linear_value_head_dim * hidden


def _latent_attention(args: Namespace) -> Iterator[int]:
    """Multi-head latent attention (DeepSeek-V2): low-rank queries, keys and values."""
    hidden, heads = args.hidden_size, args.num_attention_heads // args.tensor_model_parallel_size
    query_width = args.qk_head_dim + args.qk_pos_emb_head_dim
    if args.q_lora_rank is None:
        yield hidden * heads * query_width
    else:
        yield args.q_lora_rank * (hidden + heads * query_width)
        yield _norm(args, args.q_lora_rank) if args.qk_layernorm else 0
    yield hidden * (args.kv_lora_rank + args.qk_pos_emb_head_dim)
    yield args.kv_lora_rank * heads * (args.qk_head_dim + args.v_head_dim)
    yield _norm(args, args.kv_lora_rank) if args.qk_layernorm else 0
    yield heads * args.v_head_dim * hidden


def _mlp(args: Namespace, width: int, tensor: int) -> int:
    gated = args.swiglu or args.quick_geglu
    up = width * (2 if gated else 1) // tensor
    bias = up + args.hidden_size if args.add_bias_linear else 0
    return args.hidden_size * up + width // tensor * args.hidden_size + bias


def _norm(args: Namespace, width: int) -> int:
    return width if args.normalization == "RMSNorm" else 2 * width
