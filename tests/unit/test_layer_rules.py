"""Facts and rules of gated delta nets, norms over all heads and models that see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime.utils.arguments.hf_facts import config_from_hf
from tests.support.base_config import HF_CONFIG, BaseConfig

DELTA_NET = {
    **HF_CONFIG,
    "model_type": "qwen3_5_text",
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
MINIMAX = {
    **HF_CONFIG,
    "model_type": "minimax_m2",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "rotary_dim": 16,
    "tie_word_embeddings": False,
}
SEES = {"model_type": "qwen3_5", "vision_config": {}, "text_config": DELTA_NET}
IMAGES = '{"image": "images"}'


@pytest.fixture
def base(tmp_path: Path) -> BaseConfig:
    return BaseConfig(tmp_path)


def problems(base: BaseConfig, capsys: pytest.CaptureFixture[str], config: dict[str, Any], *words: Any) -> str:
    base.write_model_config(config)
    with pytest.raises(SystemExit):
        base.parse(*words)
    return capsys.readouterr().err


def test_a_checkpoint_says_what_its_layers_are(base: BaseConfig) -> None:
    base.write_model_config({"model_type": "qwen3_5", "vision_config": {}, "text_config": DELTA_NET})
    args = base.parse("--apply-layernorm-1p")
    assert (args.experimental_attention_variant, args.linear_attention_freq) == ("gated_delta_net", 4)
    assert args.attention_output_gate and args.apply_layernorm_1p and args.qk_layernorm
    assert (args.linear_num_value_heads, args.linear_value_head_dim, args.rotary_percent) == (8, 16, 0.25)
    base.write_model_config(MINIMAX)
    args = base.parse()
    assert args.qk_layernorm_over_heads and args.moe_router_enable_expert_bias and args.rotary_percent == 0.5
    assert (args.num_experts, args.moe_ffn_hidden_size, args.moe_router_score_function) == (8, 128, "sigmoid")


def test_images_bring_the_vision_tower_along(base: BaseConfig) -> None:
    base.write_model_config(SEES)
    assert base.parse().vision_tower == "off"
    args = base.parse("--multimodal-keys", '{"image": "label"}')
    assert (args.vision_tower, args.apply_rope_fusion) == ("frozen", False)
    assert base.parse("--multimodal-keys", '{"image": "label"}', "--vision-tower", "trained").vision_tower == "trained"


def test_irregular_layers_are_a_list() -> None:
    kinds = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    assert config_from_hf({**DELTA_NET, "layer_types": kinds})["linear_attention_freq"] == [0, 1, 1, 0]
    regular = ["linear_attention"] * 3 + ["full_attention"]
    assert config_from_hf({**DELTA_NET, "layer_types": regular})["linear_attention_freq"] == 4


@pytest.mark.parametrize(
    ("config", "words", "error"),
    [
        (DELTA_NET, ["--linear-num-value-heads", 4], "--linear-num-value-heads 4 does not match"),
        (DELTA_NET, ["--linear-attention-freq", 2], "--linear-attention-freq 2 does not match"),
        (MINIMAX, ["--rotary-percent", 0.25], "--rotary-percent 0.25 does not match"),
        (HF_CONFIG, ["--linear-attention-freq", 2], "needs --experimental-attention-variant gated_delta_net"),
        (DELTA_NET, ["--qwen-gdn-backend", "flashqla"], "flashqla is not supported yet"),
        (
            DELTA_NET,
            ["--tensor-model-parallel-size", 4, "--actor-num-gpus-per-node", 4],
            "at most the 2 query groups, not 4",
        ),
        (
            {**DELTA_NET, "linear_num_key_heads": 1},
            ["--tensor-model-parallel-size", 2, "--actor-num-gpus-per-node", 2],
            "--linear-num-key-heads 1 is not a multiple of --tensor-model-parallel-size 2",
        ),
        (HF_CONFIG, ["--multimodal-keys", IMAGES], "the trainer holds a text model"),
        (
            {"model_type": "qwen3_vl", "vision_config": {}, "text_config": HF_CONFIG},
            [],
            "is a qwen3_vl with a vision tower, which has no weight table",
        ),
        (HF_CONFIG, ["--vision-tower", "frozen"], "--vision-tower frozen needs a --hf-checkpoint of qwen3_5 and"),
        (SEES, ["--multimodal-keys", IMAGES, "--vision-tower", "off"], "the trainer holds a text model"),
        (SEES, ["--multimodal-keys", '{"video": "clips"}'], "the trainer takes images, not video"),
        (SEES, ["--vision-tower", "trained", "--mtp-num-layers", 1], "does not work with --mtp-num-layers"),
        (SEES, ["--vision-tower", "frozen", "--lora-rank", 4], "does not work with --lora-rank"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    base: BaseConfig, capsys: pytest.CaptureFixture[str], config: dict[str, Any], words: list[Any], error: str
) -> None:
    assert error in problems(base, capsys, config, *words)


def test_samples_with_images_are_not_trained_as_text() -> None:
    import torch

    from slime.backends.megatron_utils.data import prepare_rollout_data

    images, clips = {"pixel_values": 0, "image_grid_thw": 0}, {"pixel_values_videos": 0}
    assert prepare_rollout_data({"multimodal_train_inputs": [None, images]}, torch.device("cpu"), takes_images=True)
    for inputs, error in ((clips, "has pixel_values_videos in"), ({"pixel_values": 0}, "lack image_grid_thw")):
        with pytest.raises(ValueError, match=f"sample 0 of this rank.*{error}"):
            prepare_rollout_data({"multimodal_train_inputs": [inputs]}, torch.device("cpu"), takes_images=True)
    with pytest.raises(ValueError, match="sample 1 of this rank has multimodal_train_inputs \\(pixel_values\\)"):
        prepare_rollout_data({"multimodal_train_inputs": [None, {"pixel_values": 0}]}, torch.device("cpu"))
