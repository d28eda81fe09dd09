"""From the parsed namespace to megatron-core's configs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from slime.backends.megatron_utils.arguments import (
    config_from_hf,
    ddp_config_from_args,
    optimizer_config_from_args,
    transformer_config_from_args,
)
from tests.support.base_config import HF_CONFIG, BaseConfig


@pytest.fixture
def base(tmp_path: Path) -> BaseConfig:
    return BaseConfig(tmp_path)


def test_transformer_config(base: BaseConfig) -> None:
    config = transformer_config_from_args(base.parse())
    assert (config.num_layers, config.hidden_size, config.num_query_groups, config.kv_channels) == (4, 64, 2, 32)
    assert (config.layernorm_epsilon, config.normalization, config.qk_layernorm) == (1e-6, "RMSNorm", True)
    assert config.activation_func is F.silu and config.gated_linear_unit and not config.add_bias_linear
    assert (config.params_dtype, config.pipeline_dtype, config.bf16) == (torch.float32, torch.float32, False)
    assert (config.attention_dropout, config.hidden_dropout) == (0.0, 0.0)
    assert config.variable_seq_lengths
    # the CPU has no fused kernels
    assert not config.apply_rope_fusion and not config.bias_activation_fusion and config.transformer_impl == "local"


def test_overrides_win(base: BaseConfig) -> None:
    assert transformer_config_from_args(base.parse(), num_layers=2).num_layers == 2


def test_virtual_stages_never_use_batched_p2p(base: BaseConfig) -> None:
    """Interleaved stages with batched p2p give wrong gradients, and so do outputs that are freed while being sent."""
    words = ("--actor-num-gpus-per-node", "2", "--pipeline-model-parallel-size", "2")
    config = transformer_config_from_args(base.parse(*words))
    assert (config.overlap_p2p_comm, config.batch_p2p_comm) == (False, True)
    config = transformer_config_from_args(base.parse(*words, "--virtual-pipeline-model-parallel-size", "2"))
    assert (config.overlap_p2p_comm, config.batch_p2p_comm) == (True, False)
    assert not config.deallocate_pipeline_outputs


def test_optimizer_and_ddp_config(base: BaseConfig) -> None:
    words = ("--lr", "1e-5", "--weight-decay", "0.1", "--adam-beta2", "0.98", "--clip-grad", "0.5")
    args = base.parse(*words, "--bf16")
    optimizer = optimizer_config_from_args(args)
    assert (optimizer.lr, optimizer.min_lr, optimizer.weight_decay) == (1e-5, 0.0, 0.1)
    assert (optimizer.adam_beta2, optimizer.clip_grad, optimizer.bf16) == (0.98, 0.5, True)
    assert optimizer.params_dtype == torch.bfloat16 and optimizer.use_distributed_optimizer
    ddp = ddp_config_from_args(args)
    assert ddp.grad_reduce_in_fp32 and ddp.use_distributed_optimizer
    assert not ddp.check_for_nan_in_grad, "X13: a gradient that isn't finite skips its step; it doesn't end the run"
    assert ddp_config_from_args(base.parse("--check-for-nan-in-loss-and-grad")).check_for_nan_in_grad
    assert not ddp_config_from_args(base.parse()).grad_reduce_in_fp32
    assert not ddp_config_from_args(
        base.parse("--bf16", "--no-accumulate-allreduce-grads-in-fp32")
    ).grad_reduce_in_fp32


def test_experts(base: BaseConfig) -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    base.write_model_config({**HF_CONFIG, **experts, "model_type": "qwen3_moe", "mlp_only_layers": [0]})
    config = transformer_config_from_args(base.parse("--debug-train-only"))
    assert (config.num_moe_experts, config.moe_router_topk, config.moe_ffn_hidden_size) == (8, 2, 32)
    assert config.moe_layer_freq == [0, 1, 1, 1]
    assert (config.moe_router_load_balancing_type, config.moe_aux_loss_coeff) == ("none", 0.0)
    assert config.moe_token_dispatcher_type == "alltoall"


def test_facts_of_configs() -> None:
    qwen2 = config_from_hf({**HF_CONFIG, "model_type": "qwen2", "head_dim": None})
    assert (qwen2["add_qkv_bias"], qwen2["qk_layernorm"], qwen2["kv_channels"]) == (True, False, 16)
    rope = {"rope_type": "llama3", "factor": 32.0, "rope_theta": 500000.0}
    llama = config_from_hf({**HF_CONFIG, "model_type": "llama", "rope_theta": None, "rope_parameters": rope})
    assert (llama["use_rope_scaling"], llama["rope_scaling_factor"], llama["rotary_base"]) == (True, 32.0, 500000.0)
    assert not llama["add_qkv_bias"] and not llama["qk_layernorm"]
    nested = config_from_hf({"model_type": "qwen3_vl", "text_config": {**HF_CONFIG, "hidden_size": 128}})
    assert nested["hidden_size"] == 128
    unknown = config_from_hf({"model_type": "mamba", "hidden_size": 8})
    assert unknown == {"hidden_size": 8}
    multi_head = config_from_hf({"num_attention_heads": 4, "hidden_size": 64})
    assert multi_head["group_query_attention"] is False and "kv_channels" not in multi_head
