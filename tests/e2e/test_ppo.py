"""`train.py` with PPO: actor, critic and engine take turns on one device."""

from __future__ import annotations

from pathlib import Path

from tests.support.tiny_run import tiny_run
from tests.support.train_cli import TrainCli

RUN_TIMEOUT_S = 420


def test_critic_first_then_both(ray_cluster: str, train_cli: TrainCli, tiny_model_dir: Path, tmp_path: Path) -> None:
    """C5, C7: in the first rollout only the critic trains and is saved, in the second both."""
    save = tmp_path / "ckpt"
    flags = tiny_run(
        tiny_model_dir, tmp_path, advantage_estimator="ppo", num_critic_only_steps=1, lambd=0.95, use_kl_loss=None,
        kl_loss_coef=None, kl_loss_type=None, ref_load=None, save=save, save_interval=1, num_steps_per_rollout=2,
        global_batch_size=None,
    )  # fmt: skip
    result = train_cli.run(*flags, timeout=RUN_TIMEOUT_S).check()

    assert set(result.series("train/critic-value_loss")) == {0, 1, 2, 3}
    assert set(result.series("train/pg_loss")) == {2, 3}, "the actor trains in the second rollout alone"
    assert result.series("train/ppo_kl")[2] == 0.0 and result.series("train/ppo_kl")[3] != 0.0
    assert all(norm > 0 for norm in result.series("train/critic-grad_norm").values())
    assert set(result.series("rollout/values")) == {1}
    assert result.series("rollout/trimmed_samples") == {1: 0.0}
    assert set(result.series("perf/critic-value_train_time")) == {0, 1}
    assert [path.name for path in sorted(save.glob("iter_*"))] == ["iter_0000001"]
    assert [path.name for path in sorted(save.glob("critic/iter_*"))] == ["iter_0000000", "iter_0000001"]
    assert len(list((save / "rollout").iterdir())) == 2, "the data's state is saved after both rollouts"
