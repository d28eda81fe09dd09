"""Resolution and checks of a whole configuration."""

from __future__ import annotations

import argparse
import socket
from pathlib import Path
from typing import Any

import pytest

from slime.utils.arguments import ConfigError, parse_args, parse_megatron_role_args, slime_validate_args
from tests.support.base_config import HF_CONFIG, BaseConfig


@pytest.fixture
def base(tmp_path: Path) -> BaseConfig:
    return BaseConfig(tmp_path)


def refused(base: BaseConfig, capsys: pytest.CaptureFixture[str], *words: Any, without: tuple[str, ...] = ()) -> str:
    """The error lines of a command line that must not parse."""
    with pytest.raises(SystemExit) as end:
        base.parse(*words, without=without)
    assert end.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    errors = [line for line in lines if line.startswith("slime: error: ")]
    assert errors
    assert not any("Traceback" in line for line in lines)
    return "\n".join(errors)


def test_base_resolves(base: BaseConfig) -> None:
    args = base.parse()
    assert args.global_batch_size == 16
    assert (args.num_layers, args.hidden_size, args.num_query_groups, args.kv_channels) == (4, 64, 2, 32)
    assert args.group_query_attention and args.qk_layernorm and args.swiglu and not args.add_bias_linear
    assert (args.norm_epsilon, args.rotary_base, args.normalization) == (1e-6, 1000000, "RMSNorm")
    assert (args.attention_dropout, args.hidden_dropout) == (0.0, 0.0)
    assert args.untie_embeddings_and_output_weights is False
    assert (args.vocab_size, args.padded_vocab_size) == (300, 384)
    assert (args.params_dtype, args.bf16, args.distributed_backend) == ("float32", False, "gloo")
    assert (args.world_size, args.data_parallel_size, args.rollout_num_gpus) == (1, 1, 1)
    assert args.offload_train and args.offload_rollout
    assert args.load == args.ref_load == args.hf_checkpoint
    assert (args.finetune, args.no_load_optim, args.start_rollout_id) == (True, True, 0)
    assert args.eps_clip_high == args.eps_clip
    assert Path(args.log_dir).is_absolute()
    assert args.set_by_user["colocate"] == "--colocate"


def test_reward_types_of_evaluation_sets_are_checked(
    base: BaseConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "eval.yaml").write_text(f"datasets: [{{name: a, path: {base.prompts}, rm_type: boxed_mat}}]")
    errors = refused(base, capsys, "--eval-config", tmp_path / "eval.yaml")
    assert "evaluation data set 'a': rm_type 'boxed_mat' is none of" in errors and "did you mean 'math'?" in errors


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--rollout-temperature", "0"], "--rollout-temperature 0.0 must be above 0"),
        (["--rollout-temperature", "-1"], "--rollout-temperature -1.0 must be above 0"),
        (["--rollout-batch-siz", "4"], "unknown flag --rollout-batch-siz (did you mean --rollout-batch-size"),
        (["--prompt-data", "/nowhere.jsonl@[0:5]"], "--prompt-data: no such file: /nowhere.jsonl"),
        (["--rm-type", "mth"], "--rm-type 'mth' is none of dapo, deepscaler,"),
        (["--rm-type", "remote_rm"], "--rm-type remote_rm needs --rm-url"),
        (["--rm-timeout", "0"], "--rm-timeout 0.0 must be more than 0 seconds"),
        (["--config", "/nowhere.yaml"], "no such file: /nowhere.yaml"),
        (["--hf-checkpoint", "/nowhere"], "--hf-checkpoint /nowhere: no config.json there"),
        (["--global-batch-size", "3"], "--global-batch-size 3 does not divide the 16 samples"),
        (["--num-steps-per-rollout", "3"], "don't divide into --num-steps-per-rollout 3"),
        (
            ["--num-steps-per-rollout", "2", "--global-batch-size", "16"],
            "--global-batch-size 16 contradicts --num-steps-per-rollout 2",
        ),
        (["--micro-batch-size", "5"], "is not a multiple of --micro-batch-size 5"),
        (["--save-interval", "5"], "--save-interval 5 needs --save"),
        (["--eval-interval", "5"], "--eval-interval 5 needs --eval-prompt-data"),
        (["--eval-prompt-data", "a", "/nowhere.jsonl"], "evaluation data set 'a': no such file: /nowhere.jsonl"),
        (["--kl-coef", "0.1", "--use-kl-loss", "--kl-loss-coef", "0.1"], "exclude each other"),
        (["--kl-loss-coef", "0.1"], "--kl-loss-coef 0.1 needs --use-kl-loss"),
        (["--loss-type", "custom_loss"], "needs --custom-loss-function-path"),
        (["--eps-clip-c", "0.5"], "--eps-clip-c 0.5 must be above 1"),
        (["--use-dynamic-batch-size"], "--use-dynamic-batch-size needs --max-tokens-per-gpu"),
        (["--over-sampling-batch-size", "2"], "--over-sampling-batch-size 2 is less than --rollout-batch-size 4"),
        (["--rollout-max-context-len", "8", "--rollout-max-prompt-len", "8"], "leaves no room for a response"),
        (["--num-layers", "5"], "--num-layers 5 does not match"),
        (["--rotary-base", "10000"], "--rotary-base 10000.0 does not match"),
        (["--untie-embeddings-and-output-weights"], "does not match"),
        (["--vocab-size", "301"], "--vocab-size 301 does not match"),
        (["--tensor-model-parallel-size", "2"], "1 training devices are not a multiple of tensor 2"),
        (["--load", "/nowhere"], "--load /nowhere has neither a Megatron checkpoint"),
        (["--ref-load", "/nowhere"], "--ref-load /nowhere: neither"),
        (["--no-use-distributed-optimizer"], "the distributed optimizer is always on"),
        (["--overlap-p2p-communication"], "needs --virtual-pipeline-model-parallel-size"),
        (["--seed", "0"], "'0' is not an integer above 0"),
        (["--bf16", "--fp16"], "--bf16 and --fp16 exclude each other"),
        (["--debug-train-only", "--debug-rollout-only"], "exclude each other"),
        (["--release-train"], "--release-train is not supported yet"),
        (["--advantage-estimator", "ppo", "--no-offload-train"], "contradicts --advantage-estimator ppo"),
        (["--num-critic-only-steps", "2"], "--num-critic-only-steps 2 needs --advantage-estimator ppo"),
        (["--kl-coef", "0.1"], "--kl-coef 0.1 has no effect with --advantage-estimator grpo"),
        (["--advantage-estimator", "rloo", "--n-samples-per-prompt", "1"], "--n-samples-per-prompt must be above 1"),
        (["--constant-loss-denominator", "64", "--calculate-per-token-loss"], "exclude each other"),
        (["--tis-level", "sequence"], "--tis-level sequence needs --custom-tis-function-path slime.backends"),
        (["--use-opd"], "--use-opd needs --opd-type"),
        (["--use-opd", "--opd-type", "megatron"], "needs --opd-teacher-load"),
        (["--keep-old-actor", "--use-rollout-logprobs"], "exclude each other"),
        (["--sglang-dp-size", "2"], "--sglang-dp-size 2 needs --sglang-enable-dp-attention"),
        (["--sglang-mem-fraction-static", "3"], "--sglang-mem-fraction-static 3 is not between 0 and 1"),
        (["--recompute-granularity", "full"], "needs --recompute-method"),
        (["--moe-layer-freq", "([2]*)"], "expected an integer or a list"),
        (["--save-hf", "x/{step}"], "--save-hf x/{step}: 'step' can't be filled in"),
        (["--rollout-num-gpus", "3", "--rollout-num-gpus-per-engine", "2"], "is not a multiple of"),
        (["--offload", "--no-offload-train"], "contradicts --offload"),
        (["--custom-rm-path", "nowhere.reward"], "--custom-rm-path nowhere.reward: can't be imported"),
        (["--custom-rm-path", "os.path.join"], "is not an async function; expected async fn(args, sample"),
        (["--spec", "nowhere", "f"], "--spec nowhere.f: can't be imported"),
    ],
)
def test_refused(base: BaseConfig, capsys: pytest.CaptureFixture[str], words: list[str], part: str) -> None:
    """P1, C6: one line that names the flag, before anything is started."""
    assert part in refused(base, capsys, *words)


@pytest.mark.parametrize(
    ("missing", "part"),
    [
        ("--hf-checkpoint", "--hf-checkpoint is needed"),
        ("--rollout-batch-size", "--rollout-batch-size is needed"),
        ("--num-rollout", "--num-rollout or --num-epoch is needed"),
        ("--prompt-data", "--prompt-data is needed"),
        ("--rollout-max-response-len", "--rollout-max-response-len is needed"),
        ("--colocate", "--rollout-num-gpus is needed"),
    ],
)
def test_needed(base: BaseConfig, capsys: pytest.CaptureFixture[str], missing: str, part: str) -> None:
    assert part in refused(base, capsys, without=(missing,))


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([], "it can't be run with --colocate (give the engines devices of their own"),
        (["--rollout-num-gpus", "1", "--offload-rollout"], "it can't be run with --offload-rollout"),
    ],
)
def test_refused_by_the_asynchronous_driver(
    base: BaseConfig, capsys: pytest.CaptureFixture[str], words: list[str], part: str
) -> None:
    with pytest.raises(SystemExit):
        parse_args(argv=base.argv(*words, without=("--colocate",) if words else ()), rollouts_ahead=1)
    assert part in capsys.readouterr().err


def test_engines_of_their_own(base: BaseConfig, capsys: pytest.CaptureFixture[str]) -> None:
    """Either driver runs them; only the asynchronous one can send weights more rarely than it trains."""
    words = base.argv("--rollout-num-gpus", "2", without=("--colocate",))
    assert not parse_args(argv=words).offload_rollout
    assert parse_args(argv=[*words, "--update-weights-interval", "3"], rollouts_ahead=1).rollouts_ahead == 1
    assert "needs train_async.py" in refused(base, capsys, "--update-weights-interval", "3")


def test_problems_are_reported_together(base: BaseConfig, capsys: pytest.CaptureFixture[str]) -> None:
    text = refused(base, capsys, "--rollout-temperature", "0", "--save-interval", "1", "--num-layers", "9")
    assert len(text.splitlines()) == 3


def test_port_in_use(base: BaseConfig, capsys: pytest.CaptureFixture[str]) -> None:
    """L19: a busy router port is an error that names it."""
    with socket.socket() as sock:
        sock.bind(("", 0))
        sock.listen()
        port = sock.getsockname()[1]
        assert f"--sglang-router-port {port}: the port is in use" in refused(
            base, capsys, "--sglang-router-port", port
        )
    assert base.parse("--sglang-router-port", port).sglang_router_port == port


def test_yaml_is_checked_like_flags(base: BaseConfig, capsys: pytest.CaptureFixture[str]) -> None:
    """P3, P1: a file's values take part in every check, and the command line wins over them."""
    path = base.write("c.yaml", "rollout_temperature: 0\nuse_kl_loss: true\n")
    assert f"{path}: rollout_temperature 0.0 must be above 0" in refused(base, capsys, "--config", path)
    args = base.parse("--config", path, "--rollout-temperature", "0.5", "--no-use-kl-loss")
    assert (args.rollout_temperature, args.use_kl_loss) == (0.5, False)


def test_explicit_start_rollout_id_is_kept(base: BaseConfig) -> None:
    """C2: an explicit --start-rollout-id 7 isn't overwritten when weights alone are loaded."""
    assert base.parse("--start-rollout-id", "7").start_rollout_id == 7


def test_context_limit_is_not_the_response_limit(base: BaseConfig) -> None:
    """P5: without a context limit there is none, whatever the response limit."""
    args = base.parse()
    assert (args.rollout_max_context_len, args.rollout_max_prompt_len) == (None, None)
    args = base.parse("--rollout-max-context-len", "100")
    assert (args.rollout_max_prompt_len, args.eval_max_context_len) == (99, 100)


def test_equal_dump_paths(base: BaseConfig, capsys: pytest.CaptureFixture[str]) -> None:
    """P4: two dumps on one path are refused."""
    words = ("--save-debug-rollout-data", "d/{rollout_id}.pt", "--save-debug-train-data", "d/{rollout_id}.pt")
    assert "are both d/{rollout_id}.pt" in refused(base, capsys, *words)


def test_rollout_count_wins_over_epochs(base: BaseConfig, caplog: pytest.LogCaptureFixture) -> None:
    """D11: both given: --num-rollout counts, and it says so."""
    args = base.parse("--num-epoch", "3")
    assert args.num_rollout == 2
    assert "--num-rollout counts" in caplog.text


def test_load_resumes_from_a_checkpoint(base: BaseConfig, capsys: pytest.CaptureFixture[str]) -> None:
    """C1: a Megatron checkpoint decides the first rollout itself; optimiser and RNG come along."""
    folder = base.folder / "ckpt"
    folder.mkdir()
    args = base.parse("--load", folder, "--save", folder)
    assert (args.load, args.start_rollout_id, args.finetune) == (args.hf_checkpoint, 0, True)
    words = ("--load", folder, "--save", folder, "--exit-on-missing-checkpoint")
    assert "has neither a Megatron checkpoint" in refused(base, capsys, *words)
    (folder / "latest_checkpointed_iteration.txt").write_text("4")
    args = base.parse("--load", folder, "--save", folder)
    assert (args.load, args.start_rollout_id, args.finetune, args.no_load_optim) == (str(folder), None, False, False)


def test_modes(base: BaseConfig) -> None:
    """P6: no engines without a need for them; a trainer alone sleeps only when told to."""
    args = base.parse("--debug-train-only", without=("--colocate", "--rollout-max-response-len"))
    assert (args.rollout_num_gpus, args.offload_train, args.offload_rollout) == (0, False, False)
    args = base.parse("--debug-rollout-only", "--rollout-num-gpus", "2", without=("--colocate",))
    assert (args.rollout_num_gpus, args.offload_rollout, args.vocab_size) == (2, False, 300)


def test_load_debug_rollout_data_implies_train_only(base: BaseConfig) -> None:
    args = base.parse("--load-debug-rollout-data", "d/{rollout_id}.pt", without=("--prompt-data", "--colocate"))
    assert args.debug_train_only


def test_parallel_sizes(base: BaseConfig, capsys: pytest.CaptureFixture[str]) -> None:
    four = ("--actor-num-gpus-per-node", "4")
    args = base.parse(*four, "--tensor-model-parallel-size", "2", "--sequence-parallel")
    assert (args.data_parallel_size, args.expert_tensor_parallel_size, args.padded_vocab_size) == (2, 2, 512)
    args = base.parse(*four, "--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1")
    assert args.virtual_pipeline_model_parallel_size == 2
    text = refused(base, capsys, *four, "--tensor-model-parallel-size", "4", "--pipeline-model-parallel-size", "3")
    assert "is not a multiple of" in text


def test_mixture_of_experts(base: BaseConfig, capsys: pytest.CaptureFixture[str]) -> None:
    """Expert facts come from the config; layouts with wrong gradients are refused."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    base.write_model_config({**HF_CONFIG, **experts, "model_type": "qwen3_moe", "decoder_sparse_step": 1})
    args = base.parse("--ffn-hidden-size", "777", "--moe-layer-freq", "([1]*4)")  # there is no dense layer
    assert (args.num_experts, args.moe_router_topk, args.moe_ffn_hidden_size) == (8, 2, 32)
    assert not args.moe_router_pre_softmax
    base.write_model_config({**HF_CONFIG, **experts, "model_type": "qwen3_moe", "mlp_only_layers": [1]})
    assert "has mlp_only_layers [1], but SGLang serves every layer" in refused(base, capsys)
    assert base.parse("--debug-train-only").num_experts == 8
    base.write_model_config({**HF_CONFIG, **experts, "model_type": "qwen3_moe", "decoder_sparse_step": 1})
    two = ("--actor-num-gpus-per-node", "2", "--tensor-model-parallel-size", "2")
    assert "need --sequence-parallel" in refused(base, capsys, *two)
    text = refused(base, capsys, *two, "--sequence-parallel", "--expert-tensor-parallel-size", "1")
    assert "wrong expert gradients" in text
    assert "alltoall or flex" in refused(base, capsys, "--moe-token-dispatcher-type", "allgather")


def test_settings_without_their_interval_are_reported(base: BaseConfig, caplog: pytest.LogCaptureFixture) -> None:
    base.parse("--save", base.folder / "saved", "--eval-prompt-data", "a", base.prompts)
    assert "saved without --save-interval: no checkpoint is saved" in caplog.text
    assert "without --eval-interval: nothing is evaluated" in caplog.text


def test_a_wrong_evaluation_yaml_names_its_key(base: BaseConfig, capsys: pytest.CaptureFixture[str]) -> None:
    path = base.write(
        "eval.yaml", f"eval:\n  defaults: {{temprature: 0.6}}\n  datasets: [{{name: a, path: {base.prompts}}}]\n"
    )
    assert "temprature" in refused(base, capsys, "--eval-interval", "1", "--eval-config", path)
    twice = ("--eval-prompt-data", "a", base.prompts, "a", base.prompts)
    assert "'a'" in refused(base, capsys, "--eval-interval", "1", *twice)


def test_device_limits_are_reported(base: BaseConfig, caplog: pytest.LogCaptureFixture) -> None:
    base.parse("--moe-permute-fusion", "--attention-backend", "flash")
    assert "not available on this device (cpu), without effect: --moe-permute-fusion" in caplog.text


def test_evaluation_data_sets(base: BaseConfig) -> None:
    args = base.parse("--eval-prompt-data", base.prompts, "--eval-temperature", "0", "--eval-interval", "1")
    assert args.eval_prompt_data == ["aime", base.prompts]
    assert [(config.name, config.temperature) for config in args.eval_datasets] == [("aime", 0.0)]
    path = base.write("e.yaml", f"eval:\n  datasets:\n    a: {{path: {base.prompts}, top_p: 0.9}}\n")
    config = base.parse("--eval-config", path).eval_datasets[0]
    assert (config.name, config.top_p, config.temperature) == ("a", 0.9, 1.0)


def test_hand_made_namespace(base: BaseConfig) -> None:
    """What a namespace made by hand lacks is filled from the flag table before the checks."""
    args = argparse.Namespace(
        hf_checkpoint=str(base.model),
        prompt_data=base.prompts,
        rollout_batch_size=4,
        n_samples_per_prompt=2,
        num_rollout=1,
        rollout_max_response_len=8,
        colocate=True,
        actor_num_gpus_per_node=2,
    )
    assert slime_validate_args(args) is None
    assert (args.rollout_num_gpus, args.global_batch_size, args.offload_train) == (2, 8, True)
    assert args.sglang_server_concurrency == 512
    slime_validate_args(args)  # a second time changes nothing
    assert args.global_batch_size == 8
    with pytest.raises(ConfigError, match="--rollout-temperature"):
        slime_validate_args(argparse.Namespace(**{**vars(args), "rollout_temperature": 0.0}))
    with pytest.raises(ValueError, match="is needed"):
        slime_validate_args(argparse.Namespace())


def test_broken_model_config(base: BaseConfig, capsys: pytest.CaptureFixture[str]) -> None:
    (base.model / "config.json").write_text("{")
    assert "config.json is not JSON" in refused(base, capsys)


def test_device_decides_the_backend(base: BaseConfig, capsys: pytest.CaptureFixture[str]) -> None:
    text = refused(base, capsys, "--distributed-backend", "nccl")
    assert "--distributed-backend nccl contradicts the device (cpu), which needs 'gloo'" in text


def test_roles(base: BaseConfig) -> None:
    args = base.parse("--advantage-estimator", "ppo", "--kl-coef", "0.1")
    path = base.write("roles.yaml", "megatron:\n  - {role: critic, overrides: {lr: 1e-5, load: /c}}\n")
    critic = parse_megatron_role_args(args, path, "critic")
    assert (critic.lr, critic.load, critic.kl_coef, critic.untie_embeddings_and_output_weights) == (
        1e-5,
        "/c",
        0,
        True,
    )
    actor = parse_megatron_role_args(args, path, "actor")
    assert (actor.lr, actor.kl_coef, args.lr) == (1e-6, 0.1, 1e-6)
    with pytest.raises(ConfigError, match="unknown setting 'lrr'"):
        parse_megatron_role_args(args, base.write("r.yaml", "megatron: [{role: actor, args: {lrr: 1}}]"), "actor")
    with pytest.raises(ConfigError, match="a second entry for role actor"):
        parse_megatron_role_args(args, base.write("s.yaml", "megatron: [{role: actor}, {role: actor}]"), "actor")


@pytest.mark.parametrize(
    ("rows", "words", "part"),
    [
        ('{"input": "1+1="}\n{"input": oops\n', [], "rows.jsonl:2: broken JSON"),
        ('{"input": "1+1="}\n[1]\n', [], "rows.jsonl:2: a row must be a JSON object"),
        ('{"input": "1+1="}\n', ["--label-key", "answer"], "no row has the label key 'answer'; the keys there are"),
        ('{"question": "1+1="}\n', [], "no row has the prompt key 'input'"),
        ('{"input": "1+1="}\n', ["--tool-key", "functions"], "no row has the tool key 'functions'"),
        ("\n", [], "no rows"),
    ],
)
def test_data_is_read_before_anything_starts(
    base: BaseConfig, capsys: pytest.CaptureFixture[str], tmp_path: Path, rows: str, words: list[str], part: str
) -> None:
    """A broken line or a key that no row has is an error at parse time, that names file and line or key."""
    path = tmp_path / "rows.jsonl"
    path.write_text(rows)
    error = refused(base, capsys, "--prompt-data", path, "--input-key", "input", *words)
    assert "--prompt-data" in error
    assert part in error
