"""`train_async.py` with the fully-async rollout: generation goes on while weights are sent and evaluations run."""

from __future__ import annotations

from pathlib import Path

from tests.support.tiny_run import tiny_run, write_prompts
from tests.support.train_cli import TrainCli

RUN_TIMEOUT_S = 420


def test_a_fully_async_run_trains_within_its_staleness(
    ray_cluster: str, train_cli: TrainCli, tiny_model_dir: Path, tmp_path: Path
) -> None:
    prompts = write_prompts(tmp_path)
    flags = tiny_run(
        tiny_model_dir, tmp_path, colocate=None, rollout_num_gpus=1, num_rollout=4, max_staleness=1,
        partial_rollout=True, eval_interval=2, eval_prompt_data=["small", f"{prompts}@[:2]"], eval_input_key="prompt",
        rollout_function_path="slime.rollout.fully_async_rollout.generate_rollout_fully_async",
    )  # fmt: skip
    result = train_cli.run(*flags, script="train_async.py", timeout=RUN_TIMEOUT_S).check()
    assert set(result.series("train/loss")) == {0, 1, 2, 3}
    assert all(value <= 1 for value in result.series("rollout/fully_async/staleness_max").values())
    assert set(result.series("rollout/fully_async/groups_ready")) == {0, 1, 2, 3}
    assert result.series("eval/small"), "evaluated beside the generation"
