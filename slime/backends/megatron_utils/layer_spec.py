"""The decoder block's spec: the device's, with the layers that a model family has otherwise."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

from slime.utils.accelerator import current
from slime.utils.arguments.hf_facts import linear_attention_pattern

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    from slime.backends.megatron_utils.modules.delta_rule import DeltaRuleKernels


def decoder_block_spec(
    args: argparse.Namespace, config: TransformerConfig, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """Spec of this pipeline stage's decoder block (virtual stage `vp_stage`).

    Raises:
        ImportError: the layers need a kernel package that is not installed.
    """
    block = current().layer_spec(config, vp_stage=vp_stage)
    pattern = linear_attention_pattern(config.linear_attention_freq, config.num_layers)
    if any(pattern):
        kernels = current().delta_rule_kernels(args.qwen_gdn_backend)
        numbers = layers_of_this_stage(config, vp_stage)
        block.layer_specs = [
            _with_gated_delta_net(layer, kernels) if pattern[number] else layer
            for number, layer in zip(numbers, block.layer_specs, strict=True)
        ]
    if args.qk_layernorm_over_heads:
        block.layer_specs = [_with_norms_over_heads(layer, config) for layer in block.layer_specs]
    if args.post_self_attn_layernorm or args.post_mlp_layernorm:
        from slime.backends.megatron_utils.post_norms import add_post_norms

        block = add_post_norms(block, attention=args.post_self_attn_layernorm, mlp=args.post_mlp_layernorm)
    return block


def layers_of_this_stage(config: TransformerConfig, vp_stage: int | None = None) -> list[int]:
    """Indices of this pipeline stage's layers, from 0, as megatron-core 0.16.1 slices a block's spec."""
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    if config.pipeline_model_parallel_layout is not None:
        layout = config.pipeline_model_parallel_layout
        return list(layout.get_layer_id_list(layer_type=LayerType.decoder, vp_stage=vp_stage))
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    return list(range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage)))


def _with_norms_over_heads(layer: ModuleSpec, config: TransformerConfig) -> ModuleSpec:
    """The layer with norms over all heads' queries and keys in place of each head's."""
    from slime.backends.megatron_utils.modules.norm_over_heads import norm_over_heads_spec

    attention = layer.submodules.self_attention
    submodules = dataclasses.replace(
        attention.submodules,
        q_layernorm=norm_over_heads_spec(config.num_attention_heads),
        k_layernorm=norm_over_heads_spec(config.num_query_groups or config.num_attention_heads),
    )
    attention = dataclasses.replace(attention, submodules=submodules)
    return dataclasses.replace(layer, submodules=dataclasses.replace(layer.submodules, self_attention=attention))


def _with_gated_delta_net(layer: ModuleSpec, kernels: DeltaRuleKernels) -> ModuleSpec:
    """The layer with a gated delta net for its attention, whose projections are those of the attention's kind."""
    from megatron.core.transformer.spec_utils import ModuleSpec

    from slime.backends.megatron_utils.modules.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules

    attention = layer.submodules.self_attention.submodules
    mixer = ModuleSpec(
        module=GatedDeltaNet,
        params={"kernels": kernels},
        submodules=GatedDeltaNetSubmodules(in_proj=attention.linear_qkv, out_proj=attention.linear_proj),
    )
    # A checkpoint has the norm under one name, whether or not the projection computes it.
    stored_names = {
        ours: theirs.replace("self_attention.linear_qkv.", "self_attention.in_proj.")
        for ours, theirs in (layer.submodules.sharded_state_dict_keys_map or {}).items()
    }
    submodules = dataclasses.replace(layer.submodules, self_attention=mixer, sharded_state_dict_keys_map=stored_names)
    return dataclasses.replace(layer, submodules=submodules)
