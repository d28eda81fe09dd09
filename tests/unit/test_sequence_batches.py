"""Packed sequences split into batches: nothing lost, order kept, filling harmless under causal attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slime.backends.megatron_utils.cpu.sequence_batches import plan_batches


@settings(deadline=None)
@given(lengths=st.lists(st.integers(0, 400), max_size=30), fill=st.booleans())
def test_taking_and_joining_gives_the_pack_back(lengths, fill):
    packed = torch.arange(sum(lengths)).unsqueeze(-1)
    plan = plan_batches(tuple(lengths), fill)
    if not plan.batches:
        assert sum(lengths) == 0
        return
    taken = [batch.take(packed) for batch in plan.batches]
    assert plan.join(taken).equal(packed)
    rows = sum(batch.count * batch.length for batch in plan.batches)
    assert rows == sum(lengths) or (fill and rows < 1.25 * sum(lengths) + 16 * len(lengths))


@settings(deadline=None, max_examples=40)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12))
@example(lengths=[17, 17, 17, 2, 40, 31])  # the four of one batch span as many tokens as they fill, but are apart
def test_causal_attention_over_batches_equals_the_loop_over_sequences(lengths):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(sum(lengths), heads, 8, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads in (4, 2, 2)
    )

    def attend(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

    plan = plan_batches(tuple(lengths), fill=True)
    together = plan.join([attend(b.take(query), b.take(key), b.take(value)) for b in plan.batches])
    parts = zip(*(x.split(lengths) for x in (query, key, value)), strict=True)
    apart = torch.cat([attend(q[None], k[None], v[None])[0] for q, k, v in parts])
    torch.testing.assert_close(together, apart, rtol=0, atol=1e-12)
    weights = torch.randn(together.shape, generator=generator, dtype=torch.float64)
    for ours, theirs in zip(
        torch.autograd.grad((together * weights).sum(), (query, key, value)),
        torch.autograd.grad((apart * weights).sum(), (query, key, value)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_equal_neighbours_need_no_copy():
    plan = plan_batches((20,) * 64, fill=True)
    packed = torch.randn(64 * 20, 2)
    (batch,) = plan.batches
    assert plan.order is None
    assert batch.take(packed).data_ptr() == packed.data_ptr()


def test_long_sequences_are_not_filled():
    assert [(b.count, b.length) for b in plan_batches((1000, 900, 1000), fill=True).batches] == [(2, 1000), (1, 900)]
