"""The zigzag layout of sequences over context-parallel ranks, and the reduction of token losses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.backends.megatron_utils.cp_utils import (
    ContextParallel,
    get_logits_and_tokens_offset_with_cp,
    get_sum_of_sample_mean,
    local_length,
    response_parts,
    slice_log_prob_with_cp,
    slice_with_cp,
)

SAMPLES = [(5, 1), (7, 6), (16, 3), (9, 8), (2, 1), (30, 17)]  # (total length, response length)


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 40), st.integers(0, 39), st.sampled_from([1, 2, 3, 4]))
def test_each_response_token_is_on_one_rank_with_the_row_that_predicts_it(
    total: int, response: int, size: int
) -> None:
    response = min(response, total - 1)
    sequence = torch.arange(100, 100 + total)
    seen: list[int] = []
    for rank in range(size):
        cp = ContextParallel(rank, size)
        local = slice_with_cp(sequence, -1, cp)
        assert len(local) == local_length(total, cp)
        mine = []
        for part in response_parts(total, response, cp):
            for k, token in enumerate(range(part.start, part.stop)):
                # the row holds the token before the one that it predicts
                assert local[part.row + k] == sequence[total - response + token - 1]
                mine.append(token)
        assert slice_log_prob_with_cp(list(range(response)), total, response, cp) == mine
        assert torch.as_tensor(slice_log_prob_with_cp(torch.arange(response), total, response, cp)).tolist() == mine
        seen += mine
    assert sorted(seen) == list(range(response))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_offsets_agree_with_the_parts(size: int) -> None:
    for total, response in SAMPLES:
        for rank in range(size):
            cp = ContextParallel(rank, size)
            _, chunks, logits, tokens = get_logits_and_tokens_offset_with_cp(total, response, cp)
            count = sum(part.stop - part.start for part in response_parts(total, response, cp))
            assert sum(stop - start for start, stop in logits) == count
            for (first, last), (start, stop), shifted in zip(chunks, logits, tokens, strict=True):
                if start < stop:
                    assert first <= start and stop <= last and shifted == (start + 1, stop + 1)


def test_a_response_without_a_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token must stand before it"):
        response_parts(4, 4, ContextParallel())


def test_values_of_the_wrong_length_are_refused() -> None:
    with pytest.raises(ValueError, match="3 values for a response of 2 tokens"):
        slice_log_prob_with_cp([0.0] * 3, 5, 2, ContextParallel())


def test_both_reductions_on_the_documented_example() -> None:
    """X7: losses [4] and [1, 1, 1]: per-sample mode 2.5, per-token mode 7/4."""
    losses, masks = torch.tensor([4.0, 1.0, 1.0, 1.0]), [torch.ones(1), torch.ones(3)]
    per_sample = get_sum_of_sample_mean([2, 4], [1, 3], masks)
    assert per_sample(losses).item() / 2 == pytest.approx(2.5)
    per_token = get_sum_of_sample_mean([2, 4], [1, 3], masks, calculate_per_token_loss=True)
    assert per_token(losses).item() / 4 == 1.75


def test_masked_tokens_count_nowhere() -> None:
    """X6: two responses of 4 tokens with 4 and 1 loss tokens are 5 tokens."""
    masks = [torch.tensor([1, 1, 1, 1]), torch.tensor([0, 0, 0, 1])]
    ones = torch.ones(8)
    assert get_sum_of_sample_mean([5, 5], [4, 4], masks, calculate_per_token_loss=True)(ones).item() == 5
    assert get_sum_of_sample_mean([5, 5], [4, 4], masks)(ones).item() == 2
    removed = [torch.zeros(4), torch.ones(4)]
    assert get_sum_of_sample_mean([5, 5], [4, 4], removed)(ones).item() == 1


def test_siblings_share_the_denominator_of_their_rollout() -> None:
    masks = [torch.ones(1), torch.ones(3)]
    reduce = get_sum_of_sample_mean([2, 4], [1, 3], masks, sample_denoms=[torch.tensor(4.0), torch.tensor(4.0)])
    assert reduce(torch.tensor([4.0, 1.0, 1.0, 1.0])).item() == 7 / 4


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_context_parallel_ranks_sum_to_the_whole(per_token: bool, size: int) -> None:
    torch.manual_seed(0)
    totals, responses = [list(x) for x in zip(*SAMPLES, strict=True)]
    masks = [(torch.rand(n) > 0.3).int() for n in responses]
    values = [torch.randn(n) for n in responses]
    whole = get_sum_of_sample_mean(totals, responses, masks, None, per_token, ContextParallel())(torch.cat(values))
    parts = torch.zeros(())
    for rank in range(size):
        cp = ContextParallel(rank, size)
        samples = zip(values, totals, responses, strict=True)
        local = torch.cat([torch.as_tensor(slice_log_prob_with_cp(v, total, n, cp)) for v, total, n in samples])
        parts += get_sum_of_sample_mean(totals, responses, masks, None, per_token, cp)(local)
    torch.testing.assert_close(parts, whole)
