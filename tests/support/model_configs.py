"""config.json of published models: what the model and run scripts must agree with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple


class Facts(NamedTuple):
    """Sizes as the authors published them."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    rope: float
    tied: bool
    eps: float = 1e-6
    kind: str = "qwen3"
    extra: dict[str, Any] = {}  # noqa: RUF012 (never changed)


def _experts(width: int) -> dict[str, Any]:
    return {
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": width,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _llama_rope(factor: float) -> dict[str, Any]:
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {"rope_scaling": {**scaling, "original_max_position_embeddings": 8192}, "max_position_embeddings": 131072}


def _delta_net(value_heads: int, **extra: Any) -> dict[str, Any]:
    return {
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "partial_rotary_factor": 0.25,
        **extra,
    }


def _shared_experts(count: int, top: int, **extra: Any) -> dict[str, Any]:
    widths = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
    return {"num_experts": count, "num_experts_per_tok": top, **widths, **extra}


def _sigmoid_experts(
    count: int, top: int, width: int, dense: int, scale: float, groups: tuple[int, int] = (1, 1), shared: int = 1
) -> dict[str, Any]:
    return {
        "n_routed_experts": count,
        "num_experts_per_tok": top,
        "moe_intermediate_size": width,
        "n_shared_experts": shared,
        "first_k_dense_replace": dense,
        "routed_scaling_factor": scale,
        "n_group": groups[0],
        "topk_group": groups[1],
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 1,
    }


def _latent(query_rank: int | None, nope: int = 128, value: int = 128) -> dict[str, Any]:
    return {
        "q_lora_rank": query_rank,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": 64,
        "v_head_dim": value,
    }


def _yarn(factor: float, beta_fast: float) -> dict[str, Any]:
    scaling = {"type": "yarn", "factor": factor, "beta_fast": beta_fast, "beta_slow": 1, "mscale": 1.0}
    return {"rope_scaling": {**scaling, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}}


def _kimi(factor: float) -> dict[str, Any]:
    experts = _sigmoid_experts(384, 8, 2048, 1, 2.827) | {"scoring_func": "sigmoid", "moe_layer_freq": 1}
    return {**experts, **_latent(1536), **_yarn(factor, 1.0)}


_GLM = {"partial_rotary_factor": 0.5, "attention_bias": True}

PUBLISHED = {
    "qwen2.5-0.5B": Facts(24, 896, 4864, 14, 2, 64, 151936, 1e6, True, kind="qwen2"),
    "qwen2.5-1.5B": Facts(28, 1536, 8960, 12, 2, 128, 151936, 1e6, True, kind="qwen2"),
    "qwen2.5-3B": Facts(36, 2048, 11008, 16, 2, 128, 151936, 1e6, True, kind="qwen2"),
    "qwen2.5-7B": Facts(28, 3584, 18944, 28, 4, 128, 152064, 1e6, False, kind="qwen2"),
    "qwen2.5-32B": Facts(64, 5120, 27648, 40, 8, 128, 152064, 1e6, False, 1e-5, kind="qwen2"),
    "qwen3-0.6B": Facts(28, 1024, 3072, 16, 8, 128, 151936, 1e6, True),
    "qwen3-1.7B": Facts(28, 2048, 6144, 16, 8, 128, 151936, 1e6, True),
    "qwen3-4B": Facts(36, 2560, 9728, 32, 8, 128, 151936, 1e6, True),
    "qwen3-4B-Instruct-2507": Facts(36, 2560, 9728, 32, 8, 128, 151936, 5e6, True),
    "qwen3-8B": Facts(36, 4096, 12288, 32, 8, 128, 151936, 1e6, False),
    "qwen3-14B": Facts(40, 5120, 17408, 40, 8, 128, 151936, 1e6, False),
    "qwen3-32B": Facts(64, 5120, 25600, 64, 8, 128, 151936, 1e6, False),
    "llama3.1-8B-Instruct": Facts(
        32, 4096, 14336, 32, 8, 128, 128256, 5e5, False, 1e-5, kind="llama", extra=_llama_rope(8.0)
    ),
    "llama3.2-3B-Instruct": Facts(
        28, 3072, 8192, 24, 8, 128, 128256, 5e5, True, 1e-5, kind="llama", extra=_llama_rope(32.0)
    ),
    "qwen3-30B-A3B": Facts(
        48, 2048, 6144, 32, 4, 128, 151936, 1e6, False, kind="qwen3_moe", extra=_experts(768)
    ),
    "qwen3-235B-A22B": Facts(
        94, 4096, 12288, 64, 4, 128, 151936, 1e6, False, kind="qwen3_moe", extra=_experts(1536)
    ),
    "qwen3.5-0.8B": Facts(
        24, 1024, 3584, 8, 2, 256, 248320, 1e7, True, kind="qwen3_5_text", extra=_delta_net(16)
    ),
    "qwen3.5-4B": Facts(
        32, 2560, 9216, 16, 4, 256, 248320, 1e7, True, kind="qwen3_5_text", extra=_delta_net(32)
    ),
    "qwen3.5-9B": Facts(
        32, 4096, 12288, 16, 4, 256, 248320, 1e7, False, kind="qwen3_5_text", extra=_delta_net(32)
    ),
    "qwen3.5-27B": Facts(
        64, 5120, 17408, 24, 4, 256, 248320, 1e7, False, kind="qwen3_5_text", extra=_delta_net(48)
    ),
    "qwen3.5-35B-A3B": Facts(
        40, 2048, 512, 16, 2, 256, 248320, 1e7, False, kind="qwen3_5_moe_text",
        extra=_delta_net(32, **_shared_experts(256, 8)),
    ),
    "qwen3-next-80B-A3B": Facts(
        48, 2048, 5120, 16, 2, 256, 151936, 1e7, False, kind="qwen3_next",
        extra=_delta_net(32, **_shared_experts(512, 10, norm_topk_prob=True, decoder_sparse_step=1)),
    ),
    "minimax-m2": Facts(
        62, 3072, 1536, 48, 8, 128, 200064, 5e6, False, kind="minimax_m2",
        extra={"num_local_experts": 256, "num_experts_per_tok": 8, "rotary_dim": 64, "scoring_func": "sigmoid"},
    ),
    "mimo-7B-rl": Facts(
        36, 4096, 11008, 32, 8, 128, 151680, 6.4e5, False, 1e-5, kind="mimo",
        extra={"attention_bias": True, "num_nextn_predict_layers": 1},
    ),
    "glm4-9B": Facts(40, 4096, 13696, 32, 2, 128, 151552, 1e4, False, 1e-5, kind="glm4", extra=_GLM),
    "glm4-32B": Facts(
        61, 6144, 23040, 48, 8, 128, 151552, 1e4, False, 1e-5, kind="glm4", extra=_GLM | {"attention_bias": False}
    ),
    "glm4.5-106B-A12B": Facts(
        46, 4096, 10944, 96, 8, 128, 151552, 1e6, False, 1e-5, kind="glm4_moe",
        extra=_GLM | _sigmoid_experts(128, 8, 1408, 1, 1.0),
    ),
    "glm4.5-355B-A32B": Facts(
        92, 5120, 12288, 96, 8, 128, 151552, 1e6, False, 1e-5, kind="glm4_moe",
        extra=_GLM | _sigmoid_experts(160, 8, 1536, 3, 2.5) | {"use_qk_norm": True},
    ),
    "glm4.7-30B-A3B": Facts(
        47, 2048, 10240, 20, 20, 64, 154880, 1e6, False, 1e-5, kind="glm4_moe_lite",
        extra=_sigmoid_experts(64, 4, 1536, 1, 1.8) | _latent(768, 192, 256),
    ),
    "deepseek-v3": Facts(
        61, 7168, 18432, 128, 128, 64, 129280, 1e4, False, kind="deepseek_v3",
        extra=_sigmoid_experts(256, 8, 2048, 3, 2.5, (8, 4)) | _latent(1536) | _yarn(40, 32),
    ),
    "kimi-k2": Facts(61, 7168, 18432, 64, 64, 64, 163840, 5e4, False, kind="kimi_k2", extra=_kimi(32.0)),
    "kimi-k2-thinking": Facts(61, 7168, 18432, 64, 64, 64, 163840, 5e4, False, kind="kimi_k2", extra=_kimi(64.0)),
    "moonlight": Facts(
        27, 2048, 11264, 16, 16, 64, 163840, 5e4, False, 1e-5, kind="deepseek_v3",
        extra=_sigmoid_experts(64, 6, 1408, 1, 2.446, shared=2) | _latent(None),
    ),
}  # fmt: skip


def published_config(name: str) -> dict[str, Any]:
    """The content of that model's config.json."""
    facts = PUBLISHED[name]
    config = {
        "model_type": facts.kind,
        "num_hidden_layers": facts.layers,
        "hidden_size": facts.hidden,
        "intermediate_size": facts.ffn,
        "num_attention_heads": facts.heads,
        "num_key_value_heads": facts.kv_heads,
        "head_dim": facts.head_dim,
        "vocab_size": facts.vocab,
        "rope_theta": facts.rope,
        "tie_word_embeddings": facts.tied,
        "rms_norm_eps": facts.eps,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "max_position_embeddings": 40960,
        **facts.extra,
    }
    if not facts.kind.startswith("qwen3_5"):
        return config
    kind = facts.kind.removesuffix("_text")  # published beside a vision tower
    return {
        "model_type": kind,
        "tie_word_embeddings": facts.tied,
        "text_config": config,
        "vision_config": {"model_type": kind},
    }


def write_model_folder(name: str, folder: Path) -> Path:
    """A Hugging Face folder of that model with nothing but its config.json."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(published_config(name)))
    return folder
