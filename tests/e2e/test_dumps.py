"""Dumps of one run are what another trains on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny_run import tiny_run
from tests.support.train_cli import TrainCli

RUN_TIMEOUT_S = 420


def test_rollouts_alone_then_training_alone(
    ray_cluster: str, train_cli: TrainCli, tiny_model_dir: Path, tmp_path: Path
) -> None:
    """--debug-rollout-only with --dump-details, then --load-debug-rollout-data with --save-debug-train-data."""
    import torch

    dump = tmp_path / "dump"
    flags = tiny_run(
        tiny_model_dir, tmp_path, num_rollout=1, colocate=None, rollout_num_gpus=1, debug_rollout_only=True,
        dump_details=dump,
    )  # fmt: skip
    rolled = train_cli.run(*flags, timeout=RUN_TIMEOUT_S).check()
    assert sorted(str(path.relative_to(dump)) for path in dump.rglob("*.pt")) == ["rollout_data/0.pt"]
    assert (dump / "tokenizer" / "tokenizer_config.json").is_file()
    reward = rolled.series("rollout/raw_reward")[0]

    flags = tiny_run(
        tiny_model_dir, tmp_path, num_rollout=1, load_debug_rollout_data=dump / "rollout_data" / "{rollout_id}.pt",
        save_debug_train_data=tmp_path / "train-{rollout_id}-{rank}.pt",
    )  # fmt: skip
    trained = train_cli.run(*flags, timeout=RUN_TIMEOUT_S).check()
    assert trained.series("rollout/raw_reward")[0] == pytest.approx(reward)
    assert trained.series("train/train_rollout_logprob_abs_diff")[0] < 5e-5

    content = torch.load(tmp_path / "train-0-0.pt", weights_only=False)
    samples = torch.load(dump / "rollout_data" / "0.pt", weights_only=False)["samples"]
    assert content["format_version"] == 2 and len(content["samples"]) == len(samples) == 16
    by_index = {sample["index"]: sample for sample in samples}
    for sample in content["samples"]:
        assert sample["tokens"].tolist() == by_index[sample["sample_index"]]["tokens"]
        assert len(sample["advantages"]) == len(sample["ref_log_probs"]) == sample["response_lengths"]
