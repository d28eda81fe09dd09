"""`train.py` as a user runs it: a colocated GRPO run of the tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.tiny_run import tiny_run
from tests.support.train_cli import TrainCli, TrainResult

RUN_TIMEOUT_S = 420


def test_colocated_grpo_trains_and_reports(
    ray_cluster: str, train_cli: TrainCli, tiny_model_dir: Path, tmp_path: Path
) -> None:
    """Two rollouts: metrics under their public names, exact equalities at step 0, nothing left behind."""
    prompts = tmp_path / "prompts.jsonl"
    evaluation = {
        "eval_prompt_data": ["two", f"{prompts}@[0:2]", "last", f"{prompts}@[-1:]"],
        "eval_interval": 2,
        "n_samples_per_eval_prompt": 2,
        "log_passrate": True,
    }
    tracking = {"use_tensorboard": True, "tb_project_name": "e2e"}
    profiling = {
        "use_pytorch_profiler": True,
        "profile_step_start": 1,
        "profile_target": ["train_actor", "train_log_probs"],
    }
    checks = {"check_weight_update_equal": True, "ci_test": True}
    flags = tiny_run(tiny_model_dir, tmp_path, **checks, **tracking, **profiling, **evaluation)
    env = {"TENSORBOARD_DIR": str(tmp_path / "tensorboard")}
    result = train_cli.run(*flags, timeout=RUN_TIMEOUT_S, env=env).check()

    assert result.series("train/ppo_kl")[0] == 0.0
    assert result.series("train/kl_loss")[0] == 0.0
    assert result.series("train/train_rollout_logprob_abs_diff")[0] < 5e-5
    for name in ("train/loss", "train/grad_norm", "rollout/raw_reward", "perf/step_time", "perf/rollout_time"):
        assert set(result.series(name)) == {0, 1}, name
    assert all(value > 0 for value in result.series("train/grad_norm").values())
    for rollout in (0, 1):
        (line,) = [line for line in result.output.splitlines() if line.startswith(f"rollout {rollout}/1 |")]
        for label in ("reward", "loss", "kl", "grad norm", "tokens/s", "step"):
            assert label in line, line
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1
    check_evaluations(result)
    traces = {path.name for path in (result.log_dir / "profile").iterdir()}
    assert traces == {f"{target}-rollout1-rank0.json.gz" for target in ("train_actor", "train_log_probs")}


def check_evaluations(result: TrainResult) -> None:
    """L15: one before the first rollout and one after the last, of both data sets, with every answer on disk."""
    for name, answers in (("two", 4), ("last", 2)):
        assert set(result.series(f"eval/{name}")) == set(result.series(f"eval/{name}-pass@2")) == {0, 1}
        for rollout in (0, 1):
            text = (result.log_dir / "eval" / name / f"{rollout}.jsonl").read_text()
            rewards = [json.loads(line)["reward"] for line in text.splitlines()]
            assert len(rewards) == answers
            assert result.series(f"eval/{name}")[rollout] == pytest.approx(sum(rewards) / answers)
