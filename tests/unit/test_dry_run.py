"""`--dry-run`: placement, batch arithmetic and memory from the configuration alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime.utils.dry_run.batches import plan_batches
from slime.utils.dry_run.memory import plan_memory
from slime.utils.dry_run.parameters import count_rank_parameters
from slime.utils.dry_run.placement import plan_placement
from slime.utils.dry_run.text import bytes_text
from tests.support.base_config import HF_CONFIG, BaseConfig

EIGHT = ("--actor-num-gpus-per-node", 8)


@pytest.fixture
def base(tmp_path: Path) -> BaseConfig:
    return BaseConfig(tmp_path)


def dry_run(base: BaseConfig, capsys: pytest.CaptureFixture[str], *words: object) -> str:
    with pytest.raises(SystemExit) as exit_info:
        base.parse(*words)
    assert exit_info.value.code == 0
    return capsys.readouterr().out


def test_changed_settings_and_their_origin(base: BaseConfig, capsys: pytest.CaptureFixture[str]) -> None:
    path = base.write("run.yaml", "lr: 0.001\n")
    text = dry_run(base, capsys, "--dry-run", "--config", path)
    lines = {line.split(" = ")[0].strip(): line for line in text.splitlines() if " = " in line}
    assert lines["lr"].endswith(f"= 0.001  ({path}: lr)")
    assert lines["rollout_batch_size"].endswith("= 4  (--rollout-batch-size)")
    assert lines["num_layers"].endswith("= 4  (derived)")
    assert "rollout_temperature" not in lines
    for section in ("configuration (not at its default):", "placement:", "batches:", "memory per device:"):
        assert section in text.splitlines()


def test_full_shows_defaults_too(base: BaseConfig, capsys: pytest.CaptureFixture[str]) -> None:
    text = dry_run(base, capsys, "--dry-run=full")
    assert "rollout_temperature" in text and "sglang_schedule_policy" in text and "router_policy" in text


def test_json(base: BaseConfig, capsys: pytest.CaptureFixture[str]) -> None:
    content = json.loads(dry_run(base, capsys, "--dry-run=json"))
    assert content["settings"]["global_batch_size"] == 16
    assert content["origins"]["colocate"] == "--colocate"
    assert content["placement"][0]["engine"] == {"engine": 0, "rank": 0}
    assert content["batches"]["steps_per_rollout"] == 1
    assert content["memory"]["trainer"]["parameters"] > 0


def test_other_forms_are_refused(base: BaseConfig, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        base.parse("--dry-run=everything")
    assert exit_info.value.code == 2
    assert "--dry-run: 'everything' is not one of changed, full, json" in capsys.readouterr().err


def test_problems_come_before_the_report(base: BaseConfig, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        base.parse("--dry-run", "--rollout-temperature", "0")
    assert exit_info.value.code == 2
    assert capsys.readouterr().out == ""


def test_keys_are_not_shown(base: BaseConfig, capsys: pytest.CaptureFixture[str]) -> None:
    for form in ("changed", "full", "json"):
        assert "s3cret" not in dry_run(base, capsys, f"--dry-run={form}", "--wandb-key", "s3cret")


def test_colocated_placement(base: BaseConfig) -> None:
    words = ("--tensor-model-parallel-size", 2, "--pipeline-model-parallel-size", 2, "--rollout-num-gpus-per-engine")
    devices = plan_placement(base.parse(*EIGHT, *words, 4))
    assert [device.engine for device in devices] == [{"engine": i // 4, "rank": i % 4} for i in range(8)]
    assert devices[5].trainer == {"rank": 5, "tp": 1, "cp": 0, "dp": 0, "pp": 1}
    assert devices[2].trainer == {"rank": 2, "tp": 0, "cp": 0, "dp": 1, "pp": 0}


def test_parts_alone(base: BaseConfig) -> None:
    devices = plan_placement(base.parse("--debug-train-only", *EIGHT, without=("--colocate",)))
    assert len(devices) == 8 and all(device.trainer and device.engine is None for device in devices)
    devices = plan_placement(base.parse("--debug-rollout-only", "--rollout-num-gpus", 2, without=("--colocate",)))
    assert len(devices) == 2 and all(device.engine and device.trainer is None for device in devices)


def test_nodes(base: BaseConfig) -> None:
    devices = plan_placement(base.parse("--actor-num-nodes", 2, *EIGHT))
    assert [(device.node, device.device) for device in devices[6:10]] == [(0, 6), (0, 7), (1, 0), (1, 1)]


def test_fixed_micro_batches(base: BaseConfig) -> None:
    words = ("--rollout-max-context-len", 100, "--num-steps-per-rollout", 2, "--micro-batch-size", 2)
    batches = plan_batches(base.parse(*words))
    assert batches is not None
    assert (batches.samples_per_rollout, batches.samples_per_step, batches.steps_per_rollout) == (16, 8, 2)
    assert (batches.num_rollouts, batches.total_steps, batches.micro_batches_per_step) == (2, 4, 4)
    assert batches.tokens_per_micro_batch == 256  # 2 x 100, padded to 128


def test_packed_micro_batches(base: BaseConfig) -> None:
    """By the schedule of training: 3 samples of 100 tokens fit into 350, so 16 make 6 micro-batches, 3 per rank."""
    words = ("--use-dynamic-batch-size", "--max-tokens-per-gpu", 350, "--rollout-max-context-len", 100)
    batches = plan_batches(base.parse(*words, "--actor-num-gpus-per-node", 2))
    assert batches is not None
    assert (batches.samples_per_rank_and_step, batches.micro_batches_per_step) == (8, 3)
    assert batches.tokens_per_micro_batch == 384


def test_lengths_without_a_limit_are_unknown(base: BaseConfig) -> None:
    args = base.parse("--use-dynamic-batch-size", "--max-tokens-per-gpu", 350)
    batches = plan_batches(args)
    assert batches is not None and (batches.longest_sample, batches.micro_batches_per_step) == (None, None)
    memory = plan_memory(base.parse())
    assert memory.trainer is not None and memory.trainer.log_prob_buffers is None


def test_evaluation_alone_trains_nothing(base: BaseConfig) -> None:
    args = base.parse("--num-rollout", 0, "--eval-prompt-data", "a", base.prompts, "--eval-interval", 1)
    assert plan_batches(args) is None
    memory = plan_memory(args)
    assert memory.trainer is not None and (memory.trainer.gradients, memory.trainer.optimizer_state) == (0, 0)


def test_parameters_of_known_models(base: BaseConfig) -> None:
    """The sizes that the models' authors state: 0.6 B with 0.44 B outside the embedding; 30.5 B."""
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
    sizes |= {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
    base.write_model_config({**HF_CONFIG, **sizes})
    args = base.parse("--make-vocab-size-divisible-by", 1)
    assert count_rank_parameters(args, 0).total == 596_049_920
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "hidden_size": 2048}
    experts |= {"num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "norm_topk_prob": True}
    config = {**HF_CONFIG, **sizes, **experts, "model_type": "qwen3_moe", "tie_word_embeddings": False}
    base.write_model_config(config)
    assert count_rank_parameters(base.parse("--make-vocab-size-divisible-by", 1), 0).total == 30_532_122_624


def test_memory_falls_with_parallelism(base: BaseConfig) -> None:
    context = ("--rollout-max-context-len", 64, "--bf16")
    one = plan_memory(base.parse(*context)).trainer
    data = plan_memory(base.parse(*context, *EIGHT)).trainer
    tensor = plan_memory(base.parse(*context, *EIGHT, "--tensor-model-parallel-size", 2)).trainer
    assert one is not None and data is not None and tensor is not None
    assert one.weights == 2 * one.parameters and one.gradients == 4 * one.parameters
    assert one.optimizer_state == 12 * one.parameters
    assert (data.weights, data.gradients) == (one.weights, one.gradients)
    assert data.optimizer_state == one.optimizer_state // 8
    assert 0.5 < tensor.weights / one.weights < 0.7  # norms are not split, the vocabulary's padding is wider


def test_host_copies(base: BaseConfig) -> None:
    actor = plan_memory(base.parse()).trainer
    both = plan_memory(base.parse("--use-kl-loss")).trainer
    assert actor is not None and both is not None and both.host_copies == 2 * actor.host_copies


def test_critic(base: BaseConfig, capsys: pytest.CaptureFixture[str]) -> None:
    """A model of its own on the actor's devices, with one output instead of the vocabulary, and no host copies."""
    memory = plan_memory(base.parse("--advantage-estimator", "ppo"))
    assert memory.trainer is not None and memory.critic is not None
    assert memory.critic.parameters == memory.trainer.parameters + 64  # the actor's output is its embedding
    assert (memory.critic.host_copies, memory.critic.log_prob_buffers) == (0, 0)
    text = dry_run(base, capsys, "--dry-run", "--advantage-estimator", "ppo")
    assert "bundle 0 (node 0, device 0): actor and critic rank 0" in text and "  critic, largest rank" in text


def test_kv_cache(base: BaseConfig) -> None:
    """2 (key and value) x 4 layers x 2 heads x 32 x 4 bytes = 2 KiB per token; a device of two has one head."""
    engine = plan_memory(base.parse("--sglang-max-total-tokens", 1000)).engine
    assert engine is not None
    assert (engine.kv_bytes_per_token, engine.kv_tokens, engine.kv_cache) == (2048, 1000, 2_048_000)
    words = ("--actor-num-gpus-per-node", 2, "--rollout-num-gpus-per-engine", 2)
    split = plan_memory(base.parse(*words)).engine
    assert split is not None and split.kv_bytes_per_token == 1024
    alone = plan_memory(base.parse("--debug-rollout-only", "--rollout-num-gpus", 1, without=("--colocate",)))
    assert alone.trainer is None and alone.engine is not None and alone.engine.kv_bytes_per_token == 2048


def test_bytes_text() -> None:
    assert [bytes_text(n) for n in (0, 1023, 1536, 3 * 1024**3)] == ["0 B", "1023 B", "1.5 KiB", "3.0 GiB"]
