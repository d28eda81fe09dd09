"""The arithmetic behind the metrics."""

from __future__ import annotations

from argparse import Namespace
from itertools import combinations

import pytest

from slime.observability.metric_utils import (
    compression_ratio,
    compute_pass_rate,
    compute_pass_rate_of_groups,
    compute_rollout_step,
    compute_statistics,
    dict_add_prefix,
    has_repetition,
    pass_at_k,
)


@pytest.mark.parametrize("n,c,k", [(4, 0, 2), (4, 1, 1), (4, 1, 2), (4, 3, 2), (8, 2, 4), (8, 8, 8)])
def test_pass_at_k_is_the_share_of_draws_with_a_right_answer(n: int, c: int, k: int) -> None:
    answers = [1] * c + [0] * (n - c)
    draws = list(combinations(answers, k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(any(draw) for draw in draws) / len(draws))


def test_pass_rate_of_flat_rewards() -> None:
    rates = compute_pass_rate([1, 0, 0, 0, 0, 0, 0, 0], group_size=4)
    assert rates == pytest.approx({"pass@1": 1 / 8, "pass@2": 1 / 4, "pass@4": 1 / 2})


def test_pass_rate_with_one_answer_per_prompt_says_nothing() -> None:
    assert compute_pass_rate([1, 0, 1], group_size=1) == {}


def test_pass_rate_refuses_broken_groups() -> None:
    with pytest.raises(ValueError, match="5 rewards are not 2 groups of 2"):
        compute_pass_rate([1, 0, 1, 0, 1], group_size=2)


def test_pass_rate_of_unequal_groups_stops_at_the_smallest() -> None:
    assert compute_pass_rate_of_groups([[1, 0], [0, 0, 0, 1]]) == pytest.approx({"pass@1": 0.375, "pass@2": 0.75})


def test_statistics() -> None:
    assert compute_statistics([4, 1, 3, 2]) == {"mean": 2.5, "median": 2.5, "max": 4, "min": 1}
    assert compute_statistics([]) == {}


def test_prefix() -> None:
    assert dict_add_prefix({"a": 1}, "x/") == {"x/a": 1}


@pytest.mark.parametrize("algorithm", ["zlib", "gzip", "bz2", "lzma"])
def test_compression_ratio_tells_loops_from_text(algorithm: str) -> None:
    loop = "the same again. " * 700
    text = " ".join(str(i * i) for i in range(2500))
    assert compression_ratio(loop, algorithm=algorithm) > 10 > compression_ratio(text, algorithm=algorithm)


def test_repetition_needs_a_long_answer_that_ends_in_a_loop() -> None:
    varied = " ".join(str(i * i) for i in range(2500))
    assert has_repetition(varied + "the same again. " * 700)
    assert not has_repetition("the same again. " * 600)  # 9600 characters
    assert not has_repetition("the same again. " * 700 + varied)


def test_lone_surrogates_do_not_break_the_check() -> None:
    assert has_repetition("\ud800" * 10_001)


def test_rollout_step() -> None:
    args = Namespace(rollout_batch_size=8, n_samples_per_prompt=4, global_batch_size=16)
    assert compute_rollout_step(args, 3) == 3
    args.wandb_always_use_train_step = True
    assert compute_rollout_step(args, 3) == 6
