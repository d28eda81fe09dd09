"""The gated delta rule: chunks equal the recurrence, packs equal single sequences, and weights map back and forth."""

from __future__ import annotations

import pytest
import torch

from slime.backends.megatron_utils.families.layout import LinearHeads, ModelShape
from slime.backends.megatron_utils.families.linear_attention import GATED_QKV_PARALLEL, KeyHeads
from slime.backends.megatron_utils.modules.delta_rule import gated_delta_rule, packed_conv, packed_delta_rule

SHAPE = ModelShape(4, 6, 2, 5, 32, num_experts=0, tied_embeddings=True, linear_heads=LinearHeads(2, 6, 4, 3))


def inputs(tokens: int) -> list[torch.Tensor]:
    """query, key [t, 2, 4], value [t, 4, 3], strong and weak decay, beta."""
    generator = torch.Generator().manual_seed(tokens)
    query, key = (torch.randn(tokens, 2, 4, generator=generator) for _ in range(2))
    decay = -torch.rand(tokens, 4, generator=generator) * torch.tensor([0.01, 0.1, 1.0, 20.0])
    return [
        query,
        key,
        torch.randn(tokens, 4, 3, generator=generator),
        decay,
        torch.rand(tokens, 4, generator=generator),
    ]


def recurrence(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """One token after the other, in float64, as the paper writes it."""
    query, key, value, decay, beta = (x.double() for x in (query, key, value, decay, beta))
    query, key = (torch.nn.functional.normalize(x, dim=-1).repeat_interleave(2, dim=1) for x in (query, key))
    state = torch.zeros(4, 3, 4, dtype=torch.float64)
    out = []
    for q, k, v, g, b in zip(query, key, value, decay, beta, strict=True):
        state = state * g.exp()[:, None, None]
        wrong = v - (state @ k[..., None]).squeeze(-1)
        state = state + (b[:, None] * wrong)[..., None] * k[:, None]
        out.append((state @ q[..., None]).squeeze(-1) * 4**-0.5)
    return torch.stack(out)


@pytest.mark.parametrize("tokens", [1, 7, 8, 21])
def test_chunks_equal_the_recurrence(tokens: int) -> None:
    parts = inputs(tokens)
    out = gated_delta_rule(*(x[None] for x in parts), chunk=8)
    torch.testing.assert_close(out[0].double(), recurrence(*parts), atol=1e-5, rtol=1e-4)


def test_packs_equal_single_sequences() -> None:
    """Neither a state nor the convolution's window crosses a border; nor does a gradient."""
    lengths = [5, 1, 19, 5]
    borders = torch.tensor([0, *lengths]).cumsum(0).int()
    parts = [x.requires_grad_() for x in inputs(sum(lengths))]
    out = packed_delta_rule(*parts, borders)
    alone = [
        gated_delta_rule(*(x[None] for x in one))[0] for one in zip(*(x.split(lengths) for x in parts), strict=True)
    ]
    torch.testing.assert_close(out, torch.cat(alone), atol=1e-6, rtol=1e-5)
    (gradient,) = torch.autograd.grad(out[:6].sum(), parts[2])
    assert gradient[:6].any() and not gradient[6:].any()
    x, weight = torch.randn(sum(lengths), 6), torch.randn(6, 4)
    convolved = [packed_conv(one, weight, torch.tensor([0, len(one)])) for one in x.split(lengths)]
    torch.testing.assert_close(packed_conv(x, weight, borders), torch.cat(convolved))
    torch.testing.assert_close(convolved[1], torch.nn.functional.silu(x[5:6] * weight[:, -1]))


@pytest.mark.parametrize(
    ("layout", "rows"),
    [
        (GATED_QKV_PARALLEL, [60, 10, 10]),
        (KeyHeads(tensors=("qkvz", "ba"), stacked=False), [16 + 36, 12]),
        (KeyHeads(tensors=("qkv", "z", "b", "a")), [16 + 18, 18, 6, 6]),
    ],
)
def test_layouts_cut_between_heads(layout: KeyHeads, rows: list[int]) -> None:
    """Each of two ranks holds the merged rows of its half of the heads, and everything comes back."""
    parts = [torch.randn(count, 3) for count in rows]
    full = layout.merge(parts, SHAPE)
    shards = [layout.shard(full, rank, 2) for rank in range(2)]
    back = layout.split(layout.gather(shards), SHAPE)
    assert all(torch.equal(before, after) for before, after in zip(parts, back, strict=True))
    half = ModelShape(4, 3, 1, 5, 32, num_experts=0, tied_embeddings=True, linear_heads=LinearHeads(1, 3, 4, 3))
    own = layout.split(shards[0], half)
    assert torch.equal(own[-1], parts[-1][: len(parts[-1]) // 2])
    first = own[0] if not getattr(layout, "stacked", False) else own[0][:4]
    assert torch.equal(first, parts[0][: len(first)])
