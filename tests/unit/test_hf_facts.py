"""Facts of config.json: what can't be trained as the config says is refused, not approximated."""

from __future__ import annotations

from typing import Any

import pytest

from slime.utils.arguments.errors import ConfigError
from slime.utils.arguments.hf_facts import config_from_hf
from slime.utils.arguments.rules.architecture import agrees
from tests.support.model_configs import published_config


def changed(name: str, **fields: Any) -> dict[str, Any]:
    return {**published_config(name), **fields}


def rope(name: str, **fields: Any) -> dict[str, Any]:
    return changed(name, rope_scaling={**published_config(name)["rope_scaling"], **fields})


def test_deepseek() -> None:
    facts = config_from_hf(published_config("deepseek-v3"))
    expected = {
        "multi_latent_attention": True,
        "q_lora_rank": 1536,
        "qk_head_dim": 128,
        "qk_pos_emb_head_dim": 64,
        "rope_type": "yarn",
        "rotary_scaling_factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "moe_layer_freq": [0] * 3 + [1] * 58,
        "moe_router_score_function": "sigmoid",
        "moe_router_num_groups": 8,
        "moe_router_group_topk": 4,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_shared_expert_intermediate_size": 2048,
    }
    assert {name: facts[name] for name in expected} == expected
    assert "kv_channels" not in facts, "head_dim of such a config is the rotary part alone"


def test_no_yarn_means_no_scaling() -> None:
    facts = config_from_hf(published_config("moonlight"))
    assert facts["rope_type"] == "rope" and facts["q_lora_rank"] is None
    assert facts["moe_shared_expert_intermediate_size"] == 2 * 1408


def test_glm() -> None:
    dense, moe = (config_from_hf(published_config(name)) for name in ("glm4-9B", "glm4.5-355B-A32B"))
    assert dense["post_self_attn_layernorm"] and dense["post_mlp_layernorm"] and dense["rotary_interleaved"]
    assert dense["rotary_percent"] == moe["rotary_percent"] == 0.5
    assert moe["qk_layernorm"] and not moe["rotary_interleaved"] and not moe["post_mlp_layernorm"]


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (rope("llama3.1-8B-Instruct", high_freq_factor=8.0), "high_freq_factor 8.0"),
        (changed("qwen3-4B", rope_scaling={"rope_type": "yarn", "factor": 4.0}), "'yarn'"),
        (rope("deepseek-v3", mscale_all_dim=0), "only one of mscale"),
        (rope("deepseek-v3", attention_factor=1.2), "attention_factor"),
        (changed("moonlight", rope_interleave=False), "rope_interleave"),
        (changed("deepseek-v3", topk_group=2), "num_experts_per_tok 8 with topk_group 2"),
        (changed("kimi-k2", scoring_func="softmax"), "scoring_func 'softmax'"),
        (changed("kimi-k2", moe_layer_freq=2), "moe_layer_freq 2"),
        (changed("glm4.5-106B-A12B", norm_topk_prob=False), "norm_topk_prob"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_megatron_lacks_is_refused(config: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        config_from_hf(config)


def test_one_group_is_no_group() -> None:
    facts = config_from_hf(published_config("kimi-k2"))
    assert agrees("moe_router_num_groups", 1, facts["moe_router_num_groups"], facts)
    assert not agrees("moe_router_num_groups", 8, facts["moe_router_num_groups"], facts)
