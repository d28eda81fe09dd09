"""What differs between actor and critic: folders, where the critic resumes, and settings of a role."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.utils.arguments import parse_args, parse_megatron_role_args
from tests.support.base_config import BaseConfig

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def base(tmp_path: Path) -> BaseConfig:
    return BaseConfig(tmp_path)


def write_checkpoint(folder: Path, iteration: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))


PPO = ("--advantage-estimator", "ppo")


def test_a_new_critic_starts_from_the_actors_weights(base: BaseConfig) -> None:
    save = base.folder / "ckpt"
    args = base.parse(*PPO, "--save", save, "--save-hf", f"{save}/hf")
    critic = parse_megatron_role_args(args, None, "critic")
    assert (critic.load, critic.finetune, critic.save, critic.save_hf) == (
        str(base.model), True, f"{save}/critic", None,
    )  # fmt: skip
    assert critic.loss_type == "value_loss" and args.loss_type == "policy_loss"
    assert args.use_critic and args.offload_train


def test_both_resume_at_the_actors_iteration(base: BaseConfig) -> None:
    """A critic that was saved once more than the actor, which then died, goes on where the actor does."""
    save = base.folder / "ckpt"
    write_checkpoint(save, 4)
    write_checkpoint(save / "critic", 5)
    args = base.parse(*PPO, "--save", save, "--load", save)
    critic = parse_megatron_role_args(args, None, "critic")
    assert (critic.load, critic.ckpt_step, critic.finetune) == (f"{save}/critic", 4, False)
    kept = base.parse(*PPO, "--save", save, "--load", save, "--keep-checkpoints", 1)
    assert parse_megatron_role_args(kept, None, "critic").keep_checkpoints == 3, "the actor's iteration is among them"
    older = base.parse(*PPO, "--save", save, "--load", save, "--ckpt-step", 2)
    assert parse_megatron_role_args(older, None, "critic").ckpt_step == 2


def test_after_critic_only_rollouts_the_critic_resumes_alone(base: BaseConfig) -> None:
    """C5"""
    save = base.folder / "ckpt"
    write_checkpoint(save / "critic", 1)
    args = base.parse(*PPO, "--save", save, "--load", save)
    critic = parse_megatron_role_args(args, None, "critic")
    assert args.finetune and args.load == str(base.model)
    assert (critic.load, critic.ckpt_step, critic.finetune, critic.no_load_optim) == (
        f"{save}/critic", None, False, False,
    )  # fmt: skip
    fresh = base.parse(*PPO, "--save", save)
    assert parse_megatron_role_args(fresh, None, "critic").load == str(base.model), "without --load it starts afresh"


def test_settings_of_a_role(base: BaseConfig, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(yaml: str, *words: object) -> str:
        with pytest.raises(SystemExit):
            base.parse("--megatron-config-path", base.write("roles.yaml", yaml), *words)
        return capsys.readouterr().err

    entry = "megatron: [{{role: critic, overrides: {{{}}}}}]"
    assert "tensor_model_parallel_size can't differ" in refused(entry.format("tensor_model_parallel_size: 2"), *PPO)
    assert "--advantage-estimator ppo has one" in refused(entry.format("lr: 1.0e-5"))
    save = base.folder / "ckpt"
    assert "would both save to" in refused(entry.format(f"save: {save}"), *PPO, "--save", save)
    assert "unknown setting 'lrr'" in refused(entry.format("lrr: 1"), *PPO)


def test_the_mismatch_example_parses(base: BaseConfig) -> None:
    path = REPOSITORY / "examples" / "train_infer_mismatch_helper" / "mis.yaml"
    args = parse_args(argv=base.argv("--config", path))
    assert (args.tis_level, args.tis_batch_normalize, args.rs_veto_threshold) == ("token", True, 1e-4)
