"""Dynamic sampling filters and rollout outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput, call_rollout_fn
from slime.rollout.filter_hub.base_types import (
    DynamicFilterOutput,
    MetricGatherer,
    call_dynamic_filter,
    should_drop_dynamic_filter_output,
)
from slime.rollout.filter_hub.dynamic_sampling_filters import (
    check_reward_nonzero_std,
    check_reward_nonzero_std_with_fallback,
)
from slime.utils.types import Sample
from tests.support.rollout_args import rollout_args


def group(*rewards: Any) -> list[Any]:
    return [
        [Sample(reward=r) for r in reward] if isinstance(reward, list) else Sample(reward=reward) for reward in rewards
    ]


@pytest.mark.parametrize(
    ("rewards", "keep", "reason"),
    [
        pytest.param([float(np.float32(0.1))] * 8, False, "zero_std_0.1", id="L6"),
        pytest.param([[1, 1], [0]], True, None, id="L5-kept"),
        pytest.param([[1, 0], [0.5]], False, "zero_std_0.5", id="L5-trajectories-equal"),
        pytest.param([1, 0], True, None, id="differ"),
        pytest.param([1], False, "zero_std_1.0", id="singleton"),
    ],
)
def test_std_filter(rewards: list[Any], keep: bool, reason: str | None) -> None:
    output = check_reward_nonzero_std(rollout_args(), group(*rewards))
    assert (output.keep, output.reason) == (keep, reason)


def test_std_filter_with_dict_rewards() -> None:
    """R9"""
    assert check_reward_nonzero_std(rollout_args(reward_key="a"), group({"a": 1}, {"a": 0})).keep


@pytest.mark.parametrize(("remaining", "drop"), [(5, True), (4, False), (3, False)])
def test_fallback_groups_stay_when_groups_are_short(remaining: int, drop: bool) -> None:
    output = check_reward_nonzero_std_with_fallback(rollout_args(), group(1, 1))
    assert should_drop_dynamic_filter_output(output, remaining_batch_size=remaining, target_data_size=4) is drop
    plain = DynamicFilterOutput(keep=False)
    assert should_drop_dynamic_filter_output(plain, remaining_batch_size=remaining, target_data_size=4)


def test_what_filters_may_return() -> None:
    assert call_dynamic_filter(None, None, []).keep
    assert not call_dynamic_filter(lambda args, samples: False, None, []).keep
    with pytest.raises(TypeError, match="returned str"):
        call_dynamic_filter(lambda args, samples: "yes", None, [])


def test_drops_are_counted_by_reason() -> None:
    gatherer = MetricGatherer()
    for reason in ("a", "a", None):
        gatherer.on_dynamic_filter_drop(reason)
    assert gatherer.collect() == {"rollout/dynamic_filter/drop_a": 2, "rollout/dynamic_filter/drop_unnamed": 1}


def test_rollout_outputs_are_wrapped() -> None:
    """L9: a bare list or dict is accepted."""
    bare = [[Sample()]]
    assert call_rollout_fn(lambda evaluation: bare, evaluation=False).samples is bare
    assert call_rollout_fn(lambda evaluation: {"d": {}}, evaluation=True) == RolloutFnEvalOutput({"d": {}})
    typed = RolloutFnTrainOutput(bare, {"m": 1})
    assert call_rollout_fn(lambda evaluation: typed, evaluation=False) is typed
    with pytest.raises(
        TypeError, match=r"returned NoneType with evaluation=False; it must return RolloutFnTrainOutput"
    ):
        call_rollout_fn(lambda evaluation: None, evaluation=False)
