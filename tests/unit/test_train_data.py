"""Samples → train data → shares of data-parallel ranks."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime.observability.rollout_data_utils import load_debug_rollout_data, save_debug_rollout_data
from slime.ray.reward_post_process import post_process_rewards
from slime.ray.train_data import convert_samples_to_train_data, flatten_samples, split_train_data_by_dp
from slime.rollout import forge_load
from slime.utils.types import Sample
from tests.support.rollout_args import rollout_args


def make(reward: Any, group: int | None = 0, index: int = 0, length: int = 2, **given: Any) -> Sample:
    fields = {
        "tokens": [9] * 3 + [index] * length,
        "response_length": length,
        "rollout_log_probs": [-0.5] * length,
        "status": Sample.Status.COMPLETED,
        **given,
    }
    return Sample(group_index=group, index=index, reward=reward, **fields)


def unequal_groups() -> list[Sample]:
    """X1: group A has two samples, group B three; B's are not next to each other."""
    rewards = [(1, 0), (1, 1), (0, 0), (1, 1), (1, 1)]
    return [make(float(reward), group, i) for i, (reward, group) in enumerate(rewards)]


@pytest.mark.parametrize(("with_std", "expected"), [(False, 0.5), (True, 0.5**0.5)])
def test_groups_of_unequal_size(with_std: bool, expected: float) -> None:
    """X1"""
    raw, rewards = post_process_rewards(rollout_args(grpo_std_normalization=with_std), unequal_groups())
    assert raw == [1, 1, 0, 1, 1]
    assert rewards == pytest.approx([expected, 0, -expected, 0, 0], abs=1e-5)


@pytest.mark.parametrize("with_std", [False, True])
def test_a_group_of_one_gives_zero(with_std: bool) -> None:
    """X1: never NaN."""
    args = rollout_args(grpo_std_normalization=with_std)
    assert post_process_rewards(args, [make(3.0, 0), make(1.0, 1), make(0.0, 1)])[1][0] == 0.0


def test_rloo_compares_with_the_others_of_the_group() -> None:
    """Groups of any size, a group of one gives 0, the samples of one trajectory count once."""
    args = rollout_args(advantage_estimator="rloo")
    assert post_process_rewards(args, unequal_groups())[1] == pytest.approx([1.0, 0.0, -1.0, 0.0, 0.0])
    three = [make(reward, 0, i) for i, reward in enumerate((1.0, 4.0, 7.0))] + [make(9.0, 1, 3)]
    assert post_process_rewards(args, three)[1] == pytest.approx([1 - 5.5, 4 - 4.0, 7 - 2.5, 0.0])
    fan_out = [make(1.0, 0, i, rollout_id=7) for i in range(3)] + [make(0.0, 0, 3, rollout_id=8)]
    assert post_process_rewards(args, fan_out)[1] == pytest.approx([1.0, 1.0, 1.0, -1.0])


def test_equal_rewards_give_exactly_zero() -> None:
    """L6"""
    args = rollout_args(grpo_std_normalization=True)
    assert post_process_rewards(args, [make(0.1, 0, i) for i in range(8)])[1] == [0.0] * 8


def test_fan_out_counts_a_trajectory_once() -> None:
    samples = [make(1.0, 0, i, rollout_id=7) for i in range(3)] + [make(0.0, 0, 3, rollout_id=8)]
    assert post_process_rewards(rollout_args(), samples)[1] == [0.5, 0.5, 0.5, -0.5]


@pytest.mark.parametrize("estimator", ["ppo", "reinforce_plus_plus"])
def test_other_estimators_train_on_raw_rewards(estimator: str) -> None:
    assert post_process_rewards(rollout_args(advantage_estimator=estimator), unequal_groups())[1] == [1, 1, 0, 1, 1]


def test_rows_stand_in_for_group_indices_only_when_even() -> None:
    samples = [make(float(i), None, i) for i in range(4)]
    assert post_process_rewards(rollout_args(), samples)[1] == [-0.5, 0.5, -0.5, 0.5]
    with pytest.raises(ValueError, match=r"sample 0 .*no group_index"):
        post_process_rewards(rollout_args(), samples[:3])


def test_columns() -> None:
    samples = [
        make(1.0, 0, 0, length=3, loss_mask=[1, 0, 1], rollout_id=5, metadata={"raw_reward": 9.0}),
        make(0.0, 0, 1, status=Sample.Status.TRUNCATED, remove_sample=True),
        make(1.0, 0, 2, rollout_id=5),
    ]
    data = convert_samples_to_train_data(rollout_args(), samples)
    assert data["loss_masks"] == [[1, 0, 1], [0, 0], [1, 1]]
    assert data["rollout_ids"] == [5, 0, 5] and data["rollout_mask_sums"] == [4.0, 0.0, 4.0]
    assert data["truncated"] == [0, 1, 0] and data["raw_reward"] == [9.0, 0.0, 1.0]
    assert data["response_lengths"] == [3, 2, 2] and data["sample_indices"] == [0, 1, 2]
    assert "teacher_log_probs" not in data and "metadata" not in data


def test_missing_rollout_ids_become_free_numbers() -> None:
    samples = [make(1.0, 0, i, rollout_id=rollout_id) for i, rollout_id in enumerate([None, 0, None, 2])]
    assert convert_samples_to_train_data(rollout_args(), samples)["rollout_ids"] == [1, 0, 3, 2]


def test_a_column_that_some_samples_lack() -> None:
    samples = [make(1.0, 0, 0), make(0.0, 0, 1, rollout_log_probs=None)]
    with pytest.raises(ValueError, match=r"sample 1 .*no rollout_log_probs, other samples"):
        convert_samples_to_train_data(rollout_args(), samples)


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf"), "1.0", [1.0]])
def test_a_reward_that_is_no_number(reward: Any) -> None:
    """R10: the sample and the hook are named."""
    args = rollout_args(custom_rm_path="my.module.reward")
    with pytest.raises(ValueError, match=r"sample 4 \(group 0\): reward from my\.module\.reward is .*not a finite"):
        convert_samples_to_train_data(args, [make(reward, 0, 4)])


def test_a_dict_reward_needs_a_key() -> None:
    """R8"""
    samples = [make({"score": 1, "fmt": 0}, 0, 0), make({"score": 0, "fmt": 1}, 0, 1)]
    with pytest.raises(ValueError, match=r"set --reward-key"):
        convert_samples_to_train_data(rollout_args(rm_type="x"), samples)
    data = convert_samples_to_train_data(rollout_args(reward_key="score"), samples)
    assert data["raw_reward"] == [1, 0] and data["rewards"] == [0.5, -0.5]


def test_lengths_that_don_t_fit_name_the_hook() -> None:
    args = rollout_args(custom_generate_function_path="my.generate")
    with pytest.raises(ValueError, match=r"sample 0 .*loss_mask has 1 entries for response_length 2; made by my\.gen"):
        convert_samples_to_train_data(args, [make(1.0, 0, 0, loss_mask=[1])])


def shifted(args: Namespace, samples: list[Sample]) -> tuple[list[float], list[float]]:
    return [1.0] * len(samples), [2.0] * len(samples)


def truncated(args: Namespace, samples: list[Sample]) -> tuple[list[float], list[float]]:
    return [1.0], [2.0]


def test_custom_post_process() -> None:
    args = rollout_args(custom_reward_post_process_path=f"{__name__}.shifted")
    data = convert_samples_to_train_data(args, [make({"teacher": []}, 0, 0)])
    assert (data["raw_reward"], data["rewards"]) == ([1.0], [2.0])
    args.custom_reward_post_process_path = f"{__name__}.truncated"
    with pytest.raises(ValueError, match="1 raw rewards and 1 rewards for 2 samples"):
        convert_samples_to_train_data(args, [make(1.0), make(0.0)])


def test_flatten() -> None:
    a, b, c = make(1.0, 0, 0), make(1.0, 0, 1, rollout_id=3), make(1.0, 0, 2, rollout_id=3)
    assert flatten_samples([[a, [b, c]]]) == [a, b, c] == flatten_samples([a, b, c])
    with pytest.raises(ValueError, match=r"must share a rollout_id.*sample 0"):
        flatten_samples([[[a, b]]])
    with pytest.raises(TypeError, match="returned str"):
        flatten_samples([["x"]])


def test_shares_of_two_ranks() -> None:
    import torch

    args = rollout_args(global_batch_size=2, micro_batch_size=1)
    args.use_dynamic_batch_size = args.balance_data = args.balance_by_flops = False
    data = convert_samples_to_train_data(args, [make(float(i % 2), i // 2, i, length=i + 1) for i in range(4)])
    config = {"dp_size": 2, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    shards = split_train_data_by_dp(args, data, config)
    assert sorted(i for shard in shards for i in shard["partition"]) == [0, 1, 2, 3]
    for shard in shards:
        assert shard["total_lengths"] == [4, 5, 6, 7] and shard["raw_reward"] == [0, 1, 0, 1]
        assert [len(tokens) for tokens in shard["tokens"]] == [4 + i for i in shard["partition"]]
        assert shard["tokens"][0].dtype == torch.long and shard["rollout_log_probs"][0].dtype == torch.float32
        assert shard["rollout_mask_sums"].tolist() == [float(i + 1) for i in shard["partition"]]
        assert len(shard["micro_batch_indices"]) == sum(shard["num_microbatches"]) == 2
        assert shard["global_batch_sizes"] == [2, 2]


def test_samples_that_fill_no_step_are_counted() -> None:
    args = rollout_args(global_batch_size=2, micro_batch_size=1)
    args.use_dynamic_batch_size = args.balance_data = args.balance_by_flops = False
    data = convert_samples_to_train_data(args, [make(float(i % 2), i // 2, i) for i in range(5)])
    config = {"dp_size": 2, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    shards = split_train_data_by_dp(args, data, config)
    assert [shard["trimmed_samples"] for shard in shards] == [1, 1]


def test_dump_and_replay(tmp_path: Path) -> None:
    samples = [make(float(i), 0, i) for i in range(5)]
    samples[0].note = "free attribute"
    template = str(tmp_path / "dump" / "{rollout_id}.pt")
    save_debug_rollout_data(template, samples, rollout_id=3)
    save_debug_rollout_data(template, samples[:1], rollout_id=3, evaluation=True)
    assert sorted(path.name for path in (tmp_path / "dump").iterdir()) == ["3.pt", "eval_3.pt"]
    loaded = load_debug_rollout_data(template, rollout_id=3)
    assert loaded == samples and loaded[0].note == "free attribute"
    part = load_debug_rollout_data(template, rollout_id=3, subsample_ratio=0.6)
    assert [sample.index for sample in part] == [0, 1, 4]
    with pytest.raises(FileNotFoundError, match=r"4\.pt"):
        load_debug_rollout_data(template, rollout_id=4)


def test_forge_load_replays_groups(tmp_path: Path) -> None:
    """A rollout without a dump of its own replays the first; an evaluation has its own dump."""
    template = str(tmp_path / "{rollout_id}.pt")
    samples = [make(float(i), i // 2, i) for i in range(4)]
    save_debug_rollout_data(template, samples, rollout_id=0)
    save_debug_rollout_data(template, samples[:2], rollout_id=3, evaluation=True)
    args = rollout_args(load_forge_rollout_data=template)
    output = forge_load.generate_rollout(args, 7, None)
    assert output.samples == [samples[:2], samples[2:]]
    evaluated = forge_load.generate_rollout(args, 3, None, evaluation=True)
    assert evaluated.data["replay"]["rewards"] == [0.0, 1.0]
    with pytest.raises(ValueError, match="--load-forge-rollout-data, which is not set"):
        forge_load.generate_rollout(rollout_args(), 0, None)


def test_a_custom_conversion_gets_checked_samples() -> None:
    args = rollout_args(custom_convert_samples_to_train_data_path=f"{__name__}.as_is")
    assert convert_samples_to_train_data(args, [make(None)]) == {"tokens": [[9, 9, 9, 0, 0]]}
    with pytest.raises(ValueError, match="loss_mask has 1 entries"):
        convert_samples_to_train_data(args, [make(None, loss_mask=[1])])


def as_is(args: Namespace, samples: list[Sample]) -> dict[str, Any]:
    return {"tokens": [sample.tokens for sample in samples]}
