"""The layout of samples over steps, ranks and micro-batches."""

from __future__ import annotations

import logging
import math
import random
import time
from argparse import Namespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.utils.dp_schedule import DpSchedule, build_dp_schedule, count_trimmed
from slime.utils.flops_utils import calculate_fwd_flops
from slime.utils.seqlen_balancing import (
    expand_bins_by_splitting,
    first_fit_pack,
    get_seqlen_balanced_partitions,
)

ARCHITECTURE = {
    "num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "num_query_groups": 1, "kv_channels": 4,
    "ffn_hidden_size": 16, "padded_vocab_size": 32, "swiglu": True,
}  # fmt: skip


def make_args(**changes: Any) -> Namespace:
    defaults = dict(
        use_dynamic_batch_size=True, max_tokens_per_gpu=10, micro_batch_size=1, balance_data=False,
        balance_by_flops=False, **ARCHITECTURE,
    )  # fmt: skip
    return Namespace(**(defaults | changes))


def parallel(dp: int = 1, cp: int = 1, vpp: int = 1, group: int = 1) -> dict[str, int]:
    return {"dp_size": dp, "cp_size": cp, "vpp_size": vpp, "microbatch_group_size_per_vp_stage": group}


def bins_of(schedule: DpSchedule) -> list[list[int]]:
    """Global positions per micro-batch, over all ranks."""
    return [
        [schedule.partitions[rank][i] for i in micro_batch]
        for rank, micro_batches in enumerate(schedule.micro_batch_indices)
        for micro_batch in micro_batches
    ]


class LogCapture(logging.Handler):
    """The scheduler's log messages inside a with block (hypothesis can't take pytest's fixture)."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage() + "\n"

    def __enter__(self) -> LogCapture:
        logging.getLogger("slime.utils.dp_schedule").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("slime.utils.dp_schedule").removeHandler(self)


def test_a_sample_longer_than_the_budget_is_alone() -> None:
    """X16: lengths [4, 4, 25], budget 10 -> 25 alone in its bin."""
    schedule = build_dp_schedule(make_args(), parallel(), [4, 4, 25], global_batch_size=3, rollout_indices=[0, 1, 2])
    assert bins_of(schedule) == [[0, 1], [2]]
    assert schedule.num_microbatches == [2]


def test_no_rank_gets_an_empty_micro_batch() -> None:
    """X17: lengths that would give one rank three bins and the other one are laid out globally."""
    schedule = build_dp_schedule(
        make_args(), parallel(dp=2), [9, 9, 9, 2], global_batch_size=4, rollout_indices=[0, 1, 2, 3]
    )
    assert schedule.num_microbatches == [2]
    assert all(bins_of(schedule))
    assert [len(m) for m in schedule.micro_batch_indices] == [2, 2]


def test_siblings_stay_in_one_step_and_the_remainder_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    rollout_indices = [7, 7, 3, 9, 3, 5, 5]
    schedule = build_dp_schedule(
        make_args(max_tokens_per_gpu=100), parallel(), [1] * 7, global_batch_size=3, rollout_indices=rollout_indices
    )
    assert sorted(schedule.partitions[0]) == [0, 1, 2, 3, 4]
    assert schedule.global_batch_sizes == [3]
    assert count_trimmed(schedule, 7) == 2
    assert "2 samples of 1 rollout executions are not trained" in caplog.text


@pytest.mark.parametrize(
    ("changes", "layout", "samples", "batch", "message"),
    [
        ({}, parallel(), 2, 3, "--global-batch-size 3"),
        ({}, parallel(dp=4), 2, 2, "2 samples, but the layout needs at least 4"),
        ({}, parallel(dp=2, vpp=2, group=2), 2, 2, "needs at least 4"),
        ({"use_dynamic_batch_size": False, "micro_batch_size": 3}, parallel(), 4, 4, "--micro-batch-size 3"),
        ({"use_dynamic_batch_size": False, "micro_batch_size": 2}, parallel(dp=2), 6, 6, "--micro-batch-size 2"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    changes: dict[str, Any], layout: dict[str, int], samples: int, batch: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build_dp_schedule(
            make_args(**changes), layout, [1] * samples, global_batch_size=batch, rollout_indices=list(range(samples))
        )


def test_too_few_samples_for_the_multiple_take_fewer_fuller_micro_batches(caplog: pytest.LogCaptureFixture) -> None:
    schedule = build_dp_schedule(
        make_args(), parallel(dp=2), [9, 9, 9], global_batch_size=3, rollout_indices=[0, 1, 2]
    )
    assert schedule.num_microbatches == [1]
    assert sorted(map(len, bins_of(schedule))) == [1, 2]
    assert "step 0: 3 samples can't fill 4 micro-batches" in caplog.text


def test_a_fixed_micro_batch_size_keeps_the_order() -> None:
    schedule = build_dp_schedule(
        make_args(use_dynamic_batch_size=False, micro_batch_size=2), parallel(dp=2), [5, 1, 9, 2, 3, 4, 8, 7],
        global_batch_size=4, rollout_indices=list(range(8)),
    )  # fmt: skip
    assert schedule.partitions == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert schedule.micro_batch_indices == [[[0, 1], [2, 3]], [[0, 1], [2, 3]]]
    assert (schedule.num_microbatches, schedule.global_batch_sizes) == ([1, 1], [4, 4])


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_every_sample_is_trained_exactly_once_or_counted(data: st.DataObject) -> None:
    dp, cp = data.draw(st.sampled_from([1, 2, 3])), data.draw(st.sampled_from([1, 2]))
    vpp, group = data.draw(st.sampled_from([(1, 1), (2, 2)]))
    batch = data.draw(st.integers(dp * group, 12))
    ids = data.draw(st.lists(st.integers(0, 30), min_size=batch, max_size=40))
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=len(ids), max_size=len(ids)))
    args = make_args(balance_data=data.draw(st.booleans()), balance_by_flops=data.draw(st.booleans()))
    if len(set(ids)) < batch:
        with pytest.raises(ValueError, match="--global-batch-size"):
            build_dp_schedule(
                args, parallel(dp, cp, vpp, group), lengths, global_batch_size=batch, rollout_indices=ids
            )
        return
    with LogCapture() as log:
        schedule = build_dp_schedule(
            args, parallel(dp, cp, vpp, group), lengths, global_batch_size=batch, rollout_indices=ids
        )
    repacked = "take more than --max-tokens-per-gpu" in log.text
    trained = [i for part in schedule.partitions for i in part]
    assert len(trained) == len(set(trained))
    steps = len(set(ids)) // batch
    kept = list(dict.fromkeys(ids))[: steps * batch]
    assert sorted(trained) == [i for i, rollout in enumerate(ids) if rollout in kept]
    assert count_trimmed(schedule, len(ids)) == len(ids) - len(trained)
    assert schedule.global_batch_sizes == [batch] * steps
    assert len(schedule.num_microbatches) == steps and all(n % group == 0 for n in schedule.num_microbatches)
    for rank in range(dp):
        micro_batches = schedule.micro_batch_indices[rank]
        assert len(micro_batches) == sum(schedule.num_microbatches)
        assert all(micro_batches)
        assert [i for m in micro_batches for i in m] == list(range(len(schedule.partitions[rank])))
    if not repacked:
        for items in bins_of(schedule):
            assert len(items) == 1 or sum(lengths[i] for i in items) <= args.max_tokens_per_gpu * cp
    _check_steps(schedule, ids, kept, batch)


def _check_steps(schedule: DpSchedule, ids: list[int], kept: list[int], batch: int) -> None:
    """Step k holds exactly the k-th `batch` executions, whatever rank they are on."""
    start = 0
    for step, count in enumerate(schedule.num_microbatches):
        in_step = {
            ids[part[i]]
            for part, micro_batches in zip(schedule.partitions, schedule.micro_batch_indices, strict=True)
            for micro_batch in micro_batches[start : start + count]
            for i in micro_batch
        }
        assert in_step == set(kept[step * batch : (step + 1) * batch])
        start += count


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40), st.integers(1, 8), st.booleans())
def test_balanced_partitions_cover_all_items_and_leave_none_empty(weights: list[int], k: int, equal: bool) -> None:
    if len(weights) < k or (equal and len(weights) % k):
        with pytest.raises(ValueError, match=str(k)):
            get_seqlen_balanced_partitions(weights, k, equal)
        return
    parts = get_seqlen_balanced_partitions(weights, k, equal)
    assert sorted(i for part in parts for i in part) == list(range(len(weights)))
    assert all(parts) and len(parts) == k
    if equal:
        assert len({len(part) for part in parts}) == 1


def test_balanced_partitions_are_better_than_strided() -> None:
    weights = [97, 3, 55, 41, 88, 12, 60, 44]
    sums = [sum(weights[i] for i in part) for part in get_seqlen_balanced_partitions(weights, 2, True)]
    assert max(sums) - min(sums) <= 4  # strided: 300 against 100
    assert max(sum(weights[::2]), sum(weights[1::2])) == 300


REAL_ARCHITECTURE = {
    "num_layers": 28, "hidden_size": 1024, "num_attention_heads": 16, "num_query_groups": 8, "kv_channels": 128,
    "ffn_hidden_size": 3072, "padded_vocab_size": 151936, "swiglu": True,
}  # fmt: skip


def realistic_lengths(seed: int, count: int, cv: float, longest: int = 8192) -> list[int]:
    """Log-normal around 2000 tokens with this coefficient of variation, cut at the context length."""
    generator = random.Random(seed)
    sigma = math.sqrt(math.log(1 + cv * cv))
    mu = math.log(2000) - sigma * sigma / 2
    return [max(16, min(longest, int(generator.lognormvariate(mu, sigma)))) for _ in range(count)]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6), cv=st.floats(0.3, 1.5), dp=st.sampled_from([2, 4, 8]), by_flops=st.booleans(),
    dynamic=st.booleans(),
)  # fmt: skip
def test_ranks_are_balanced_within_5_percent_of_the_lower_bound(
    seed: int, cv: float, dp: int, by_flops: bool, dynamic: bool
) -> None:
    """Of FLOPs in a step: no rank can have less than the mean, or than its heaviest micro-batch."""
    args = make_args(
        max_tokens_per_gpu=16384, balance_data=True, balance_by_flops=by_flops and dynamic,
        use_dynamic_batch_size=dynamic, **REAL_ARCHITECTURE,
    )  # fmt: skip
    lengths = realistic_lengths(seed, 1024, cv)
    schedule = build_dp_schedule(
        args, parallel(dp), lengths, global_batch_size=512, rollout_indices=list(range(len(lengths)))
    )
    start = 0
    for count in schedule.num_microbatches:
        bins = [
            [calculate_fwd_flops([lengths[part[i]] for i in items], args) for items in indices[start : start + count]]
            for part, indices in zip(schedule.partitions, schedule.micro_batch_indices, strict=True)
        ]
        per_rank = [sum(rank) for rank in bins]
        bound = max(sum(per_rank) / dp, max(max(rank) for rank in bins))
        assert max(per_rank) <= 1.05 * bound
        start += count


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), cv=st.floats(0.3, 1.5), dp=st.sampled_from([1, 4, 8]))
def test_balancing_by_flops_evens_out_micro_batches_under_the_cap(seed: int, cv: float, dp: int) -> None:
    """Within 5 % of the lower bound for a micro-batch, with at most 10 % and one per rank more of them than needed."""
    lengths = realistic_lengths(seed, 1024, cv)
    args = make_args(max_tokens_per_gpu=16384, balance_data=True, balance_by_flops=True, **REAL_ARCHITECTURE)
    schedule = build_dp_schedule(
        args, parallel(dp), lengths, global_batch_size=1024, rollout_indices=list(range(1024))
    )
    bins = bins_of(schedule)
    assert all(sum(lengths[i] for i in items) <= 16384 for items in bins)
    assert len(bins) <= 1.1 * sum(lengths) / 16384 + dp
    weights = [calculate_fwd_flops([n], args) for n in lengths]
    loads = [sum(weights[i] for i in items) for items in bins]
    assert max(loads) <= 1.05 * max(sum(loads) / len(loads), max(weights))


@pytest.mark.parametrize(
    "changes",
    [{}, {"balance_data": True}, {"balance_data": True, "balance_by_flops": True}, {"use_dynamic_batch_size": False}],
    ids=lambda changes: "-".join(changes) or "first_fit",
)
@pytest.mark.parametrize("batch", [100_000, 1000])
def test_a_hundred_thousand_samples_take_less_than_two_seconds(changes: dict[str, Any], batch: int) -> None:
    """Of CPU time, in one step or in a hundred."""
    lengths = realistic_lengths(0, 100_000, 1.0)
    args = make_args(**{"max_tokens_per_gpu": 16384, "balance_data": True, **REAL_ARCHITECTURE, **changes})
    started = time.process_time()
    schedule = build_dp_schedule(
        args, parallel(8), lengths, global_batch_size=batch, rollout_indices=list(range(100_000))
    )
    assert time.process_time() - started < 2.0
    assert sum(map(len, schedule.partitions)) == 100_000


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 30), max_size=60), st.integers(1, 25))
def test_first_fit_is_what_its_definition_says(lengths: list[int], cap: int) -> None:
    bins: list[list[int]] = []
    for index, length in enumerate(lengths):
        fitting = (items for items in bins if sum(lengths[i] for i in items) + length <= cap)
        items = next(fitting, None)
        if items is None:
            bins.append(items := [])
        items.append(index)
    assert first_fit_pack(lengths, cap) == bins


def test_first_fit_and_splitting() -> None:
    assert first_fit_pack([6, 5, 4, 5], 10) == [[0, 2], [1, 3]]
    assert sorted(expand_bins_by_splitting([[0, 1, 2, 3]], 2, [6, 5, 4, 5])) == [[0, 2], [1, 3]]
    with pytest.raises(ValueError, match="3 non-empty bins of 2 items"):
        expand_bins_by_splitting([[0, 1]], 3, [1, 1])


def test_forward_flops_of_a_dense_and_a_mixture_model() -> None:
    n, h = 10, 8
    layer = 2 * n * h * 4 * (2 + 2) + n * n * 2 * 8 + 2 * n * 8 * h + 2 * n * 3 * h * 16
    assert calculate_fwd_flops([n], Namespace(**ARCHITECTURE)) == 2 * layer + 2 * n * h * 32
    moe = Namespace(
        **ARCHITECTURE, num_experts=4, moe_layer_freq=[0, 1], moe_ffn_hidden_size=8, moe_router_topk=4,
        moe_shared_expert_intermediate_size=None,
    )  # fmt: skip
    moe_layer = layer - 2 * n * 3 * h * 16 + 2 * n * 3 * h * 8 * 4
    assert calculate_fwd_flops([n], moe) == layer + moe_layer + 2 * n * h * 32


def test_forward_flops_of_gated_delta_nets() -> None:
    """Three of four layers have work that grows with the length, not with its square."""
    sizes = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 3,
        "linear_value_head_dim": 5,
        "linear_conv_kernel_dim": 4,
    }
    hybrid = Namespace(
        **{**ARCHITECTURE, "num_layers": 4}, **sizes, linear_attention_freq=4, attention_output_gate=True
    )
    n, h = 10, 8
    head, mlp = 2 * n * h * 32, 2 * n * 3 * h * 16
    softmax = 2 * n * h * 4 * (2 * 2 + 2) + n * n * 2 * 8 + 2 * n * 8 * h  # twice the queries: their gates
    channels, rows = 2 * 2 * 3 + 4 * 5, 2 * 2 * 3 + 4 * 5 + 4 * 5 + 2 * 4
    rule = 4 * (64 * (3 * 3 + 2 * 5) // 2 + 3 * 3 * 5)
    linear = 2 * n * (h * rows + channels * 4 + rule + 4 * 5 * h)
    assert calculate_fwd_flops([n], hybrid) == head + softmax + 3 * linear + 4 * mlp
