"""Tiny Hugging Face models with random weights; all their sizes differ, so that a swapped dimension shows."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

VOCAB = 250
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
    "attention_bias": False,
}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 36, "norm_topk_prob": True}
ODD = {"vocab_size": 251}
ROPE = {"rope_theta": 1000000.0, "rope_type": "default"}
LLAMA3_ROPE = {
    "rope_theta": 500000.0,
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# a factor and a length at which every frequency of a tiny model moves, and unequal mscales, which published models
# don't have but which tell the two apart
YARN_ROPE = {
    "rope_theta": 10000.0,
    "rope_type": "yarn",
    "factor": 40.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
SHARED = {"n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5}
SIGMOID_MOE = {"n_routed_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 36, **SHARED}
LATENT = {
    "num_key_value_heads": 6,
    "head_dim": None,
    "kv_lora_rank": 28,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
}

SHARED_EXPERT = {**MOE, "shared_expert_intermediate_size": 28}
# a quarter of the layers with softmax attention; two key heads, so that tensor parallelism can cut between them
DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 3,
    "rope_parameters": {**ROPE, "partial_rotary_factor": 0.4},
}

MODELS: dict[str, dict[str, Any]] = {
    "qwen3_tied": {"model_type": "qwen3", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": False},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": False, "head_dim": 8},
    "llama": {"model_type": "llama", "tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE},
    "qwen3_moe": {"model_type": "qwen3_moe", "tie_word_embeddings": False, **MOE},
    # as SmolLM2-135M: heads that are no power of two, tied
    "smollm2": {"model_type": "llama", "tie_word_embeddings": True, "head_dim": 8, "num_key_value_heads": 3},
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        "tie_word_embeddings": False,
        "head_dim": 8,
        **MOE,
        "norm_topk_prob": False,
        "shared_expert_intermediate_size": 44,
        "mlp_only_layers": [1],
        **ODD,
    },
    "glm4": {
        "model_type": "glm4",
        "tie_word_embeddings": False,
        "attention_bias": True,
        **ODD,
        "rope_parameters": {**ROPE, "partial_rotary_factor": 0.4},
        "pad_token_id": None,
    },
    "glm4_tied": {"model_type": "glm4", "tie_word_embeddings": True, "pad_token_id": None},
    "glm4_moe": {
        "model_type": "glm4_moe",
        "tie_word_embeddings": False,
        "attention_bias": True,
        **ODD,
        "use_qk_norm": True,
        "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
        **SIGMOID_MOE,
        "n_group": 1,
        "topk_group": 1,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "tie_word_embeddings": False,
        "rope_parameters": YARN_ROPE,
        **LATENT,
        **ODD,
        **SIGMOID_MOE,
        "q_lora_rank": 26,
        "n_group": 4,
        "topk_group": 2,
    },
    "glm4_moe_lite": {
        "model_type": "glm4_moe_lite",
        "tie_word_embeddings": False,
        **LATENT,
        **ODD,
        "n_routed_experts": 8,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 36,
        "routed_scaling_factor": 1.8,
        "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
        "q_lora_rank": 26,
    },
    "moonlight": {
        "model_type": "deepseek_v3",
        "tie_word_embeddings": True,
        **LATENT,
        **ODD,
        **SIGMOID_MOE,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
    },
    "minimax_m2": {
        "model_type": "minimax_m2",
        "tie_word_embeddings": False,
        "intermediate_size": 36,
        "num_local_experts": 6,
        "num_experts_per_tok": 4,
        "rope_parameters": {**ROPE, "partial_rotary_factor": 0.4},
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    # Qwen2 with layers that predict ahead, which transformers doesn't have
    "mimo": {"model_type": "qwen2", "tie_word_embeddings": False, "head_dim": 8},
    "qwen3_next": {"model_type": "qwen3_next", "tie_word_embeddings": False, **SHARED_EXPERT, **DELTA_NET},
    "qwen3_5": {"model_type": "qwen3_5_text", "tie_word_embeddings": True, **DELTA_NET},
    "qwen3_5_experts": {
        "model_type": "qwen3_5_moe_text",
        "tie_word_embeddings": False,
        **SHARED_EXPERT,
        **DELTA_NET,
    },
}


def make_model(name: str, directory: Path, sharded: bool = False, **sizes: int) -> Path:
    """Write model, tokenizer stand-in and reference logits; returns the directory. `sizes` replace those of `SIZES`.

    `reference.pt` holds `tokens` [2, 16] and transformers' float32 `logits` [2, 16, vocabulary].
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(len(name))
    # Qwen2 has no head_dim of its own: hidden_size / heads
    fields = copy.deepcopy(
        {**SIZES, "rope_parameters": ROPE, **MODELS[name], **sizes}
    )  # transformers changes what it is given
    config = AutoConfig.for_model(
        **{key: value for key, value in fields.items() if (key, value) != ("head_dim", None)}
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            # initial norms are all ones and biases all zeros, which would hide a mistake
            parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.dim() == 1 else 0.05))
            if key.endswith(".A_log"):  # long memories, so that a state that crosses sequences shows
                parameter.copy_(torch.randn_like(parameter) * 0.5 - 2)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer) * 0.2)
        tokens = torch.randint(0, VOCAB, (2, 16))
        logits = model(tokens).logits
    model.save_pretrained(directory, max_shard_size="60KB" if sharded else "5GB")
    (directory / "tokenizer_config.json").write_text('{"stand-in": true}')
    torch.save({"tokens": tokens, "logits": logits}, directory / "reference.pt")
    return directory
