"""What --lora-* needs and contradicts, and what it makes of the rest of the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime.utils.arguments import ConfigError, parse_megatron_role_args
from slime.utils.arguments.roles import check_role_args
from tests.support.base_config import HF_CONFIG, BaseConfig

MOE = {
    **HF_CONFIG,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
BIASED_MOE = {
    **HF_CONFIG,
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "use_qk_norm": True,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
}
ETP2 = [
    "--actor-num-gpus-per-node", "2", "--tensor-model-parallel-size", "2", "--sequence-parallel",
    "--expert-tensor-parallel-size", "2",
]  # fmt: skip


@pytest.fixture
def base(tmp_path: Path) -> BaseConfig:
    return BaseConfig(tmp_path)


def test_what_is_not_given_follows_from_the_rank(base: BaseConfig) -> None:
    """The base is the engines' model, also where --ref-load names another; without a rank nothing is resolved."""
    args = base.parse("--lora-rank", "16")
    assert (args.lora_alpha, args.lora_targets) == (32.0, ["all-linear"])
    other = base.folder / "other"
    other.mkdir()
    (other / "config.json").write_text((base.model / "config.json").read_text())
    args = base.parse("--lora-rank", "16", "--ref-load", other)
    assert (args.load, args.ref_load) == (str(base.model), str(other))
    args = base.parse()
    assert (args.lora_rank, args.lora_alpha, args.lora_targets) == (None, None, None)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--lora-alpha", "8"], "--lora-alpha 8.0 needs --lora-rank"),
        (["--lora-targets", "q_proj"], "needs --lora-rank"),
        (["--lora-load", "x"], "--lora-load x needs --lora-rank"),
        (["--lora-rank", "0"], "'0' is not an integer above 0"),
        (["--lora-rank", "4", "--lora-alpha", "0"], "--lora-alpha 0.0 must be above 0"),
        (["--lora-rank", "4", "--lora-targets", "qkv"], "'qkv' is not one of all-linear, experts, q_proj, k_proj,"),
        (["--lora-rank", "4", "--lora-targets", "experts"], "the model has no experts"),
        (["--lora-rank", "4", "--lora-load", "/nowhere"], "--lora-load /nowhere: no adapter_config.json there"),
        (
            ["--lora-rank", "4", "--freeze-params-name-list", "norm"],
            "--freeze-params-name-list contradicts --lora-rank",
        ),
        (["--lora-rank", "4", "--only-train-params-name-list", "x"], "contradicts --lora-rank"),
        (["--lora-rank", "4", "--lora-save-adapter", "x/{step}"], "'step' can't be filled in"),
        (["--lora-rank", "4", "--lora-save-adapter", "x"], "--lora-save-adapter x needs --save-interval"),
    ],
)
def test_refused(base: BaseConfig, capsys: pytest.CaptureFixture[str], words: list[str], part: str) -> None:
    assert part in refused(base, capsys, *words)


def test_whole_weights_are_no_adapters_to_load(base: BaseConfig, capsys: pytest.CaptureFixture[str]) -> None:
    assert "holds whole weights" in refused(base, capsys, "--lora-rank", "4", "--load", base.model)


def test_a_folder_to_resume_from_may_be_empty_at_first(base: BaseConfig, tmp_path: Path) -> None:
    runs = str(tmp_path / "runs")
    args = base.parse("--lora-rank", "4", "--load", runs, "--save", runs)
    assert (args.load, args.resume_folder, args.finetune) == (str(base.model), runs, True)


def test_ranks_of_an_expert_share_the_adapters_rank(base: BaseConfig, capsys: pytest.CaptureFixture[str]) -> None:
    base.write_model_config(MOE)
    text = refused(base, capsys, *ETP2, "--lora-rank", "3")
    assert "--lora-rank 3 must be a multiple of --expert-tensor-parallel-size 2" in text
    assert base.parse(*ETP2, "--lora-rank", "3", "--lora-targets", "q_proj").lora_rank == 3


def test_the_router_is_frozen_too(base: BaseConfig, capsys: pytest.CaptureFixture[str]) -> None:
    """Its bias is no parameter: Megatron would move it outside the optimiser."""
    base.write_model_config(BIASED_MOE)
    assert base.parse("--lora-rank", "4").moe_router_bias_update_rate == 0.0
    assert base.parse().moe_router_enable_expert_bias
    text = refused(base, capsys, "--lora-rank", "4", "--moe-router-bias-update-rate", "0.01")
    assert "--moe-router-bias-update-rate 0.01 contradicts --lora-rank" in text


def test_a_critic_is_trained_whole(base: BaseConfig, tmp_path: Path) -> None:
    args = base.parse("--lora-rank", "4", "--advantage-estimator", "ppo")
    critic = parse_megatron_role_args(args, None, "critic")
    assert critic.lora_rank is None and critic.lora_save_adapter is None
    roles = tmp_path / "roles.yaml"
    roles.write_text("megatron:\n  - {role: critic, overrides: {lora_rank: 8}}\n")
    critic = parse_megatron_role_args(args, str(roles), "critic")
    with pytest.raises(ConfigError, match="a critic is trained whole"):
        check_role_args(args, critic, "critic")


def refused(base: BaseConfig, capsys: pytest.CaptureFixture[str], *words: Any) -> str:
    with pytest.raises(SystemExit) as end:
        base.parse(*words)
    assert end.value.code == 2
    return capsys.readouterr().err
