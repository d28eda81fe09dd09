"""The log-prob pass over a vocabulary of 150k takes little more memory than the chunk it is told to use."""

from __future__ import annotations

import pytest

from benchmarks.log_probs import measure
from tests.support.gloo_world import run_ranks


def _measure(rank: int, size: int, store: str, dtype: str, entropy: bool) -> dict[str, float]:
    return measure(vocab=151936, tokens=768, chunk=256, dtype=dtype, entropy=entropy)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("entropy", [False, True], ids=["log_probs", "entropy"])
def test_peak_is_bounded_by_the_chunk(dtype: str, entropy: bool) -> None:
    """Under 1.3 float32 chunks, forward and backward, for three chunks' worth of tokens (the benchmark has 4k)."""
    (result,) = run_ranks(_measure, 1, dtype, entropy)
    assert 0 < result["forward_chunks"] < 1.3, result
    assert result["backward_chunks"] < 1.3, result
