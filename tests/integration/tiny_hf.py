"""Tiny Hugging Face models with random weights; all their sizes differ, so that a swapped dimension shows."""

from __future__ import annotations

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
ROPE = {"rope_theta": 1000000.0, "rope_type": "default"}

MODELS: dict[str, dict[str, Any]] = {
    "qwen3_tied": {"model_type": "qwen3", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": False},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": False, "head_dim": 8},
    "llama": {"model_type": "llama", "tie_word_embeddings": True},
    "qwen3_moe": {"model_type": "qwen3_moe", "tie_word_embeddings": False, **MOE},
}


def make_model(name: str, directory: Path, sharded: bool = False) -> Path:
    """Write model, tokenizer stand-in and reference logits; returns the directory.

    `reference.pt` holds `tokens` [2, 16] and transformers' float32 `logits` [2, 16, vocabulary].
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(len(name))
    # Qwen2 has no head_dim of its own: hidden_size / heads
    config = AutoConfig.for_model(**{**SIZES, "rope_parameters": ROPE, **MODELS[name]})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # initial norms are all ones and biases all zeros, which would hide a mistake
            parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.dim() == 1 else 0.05))
        tokens = torch.randint(0, VOCAB, (2, 16))
        logits = model(tokens).logits
    model.save_pretrained(directory, max_shard_size="60KB" if sharded else "5GB")
    (directory / "tokenizer_config.json").write_text('{"stand-in": true}')
    torch.save({"tokens": tokens, "logits": logits}, directory / "reference.pt")
    return directory
