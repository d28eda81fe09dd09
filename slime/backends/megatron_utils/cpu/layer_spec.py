"""Megatron's local decoder spec with the modules that a CPU needs put in. Written for megatron-core 0.16.1."""

from __future__ import annotations

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from slime.backends.megatron_utils.cpu.attention import SdpaCoreAttention
from slime.backends.megatron_utils.cpu.norm import CpuRMSNorm

_ATTENTION_NORMS = ("q_layernorm", "k_layernorm", "kv_layernorm")
_DOWN_PROJECTIONS = ("linear_q_down_proj", "linear_kv_down_proj")


def cpu_decoder_block_spec(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Spec of this pipeline stage's decoder block (virtual stage `vp_stage`).

    Stock modules throughout, but `SdpaCoreAttention` as core attention (the stock one has neither packed sequences nor
    context parallelism) and, where the model uses RMSNorm, `CpuRMSNorm`. The down projections of multi-latent
    attention are whole on every tensor-parallel rank, as Transformer Engine has them: the stock local ones gather
    their outputs and lose the other ranks' share of the rotary keys' gradient.

    Raises:
        ValueError: LayerNorm together with sequence parallelism, for which no module exists on a CPU.
    """
    rms_norm = config.normalization == "RMSNorm"
    if config.sequence_parallel and not rms_norm:
        raise ValueError(f"sequence parallelism on the CPU needs RMSNorm, not {config.normalization}")
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, vp_stage=vp_stage
    )
    for layer in block.layer_specs:
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = SdpaCoreAttention
        for name in _DOWN_PROJECTIONS:
            if hasattr(attention, name):
                setattr(attention, name, Linear)
        if rms_norm:
            layer.submodules.input_layernorm = CpuRMSNorm
            layer.submodules.pre_mlp_layernorm = CpuRMSNorm
            for name in _ATTENTION_NORMS:
                if getattr(attention, name, IdentityOp) not in (IdentityOp, None):
                    setattr(attention, name, CpuRMSNorm)
    if rms_norm:
        block.layer_norm = CpuRMSNorm
    return block
