"""Buckets of weights as they are broadcast."""

from __future__ import annotations

import torch

from slime.backends.megatron_utils.update_weight.broadcast_group import wire_layout
from slime.backends.megatron_utils.update_weight.tensor_payload import fill


def test_tensors_of_several_dtypes_lie_without_gaps_where_they_can_be_viewed() -> None:
    """What SGLang's flattened bucket wants: it refuses a tensor that begins between two of its elements."""
    tensors = [
        ("byte", torch.arange(5, dtype=torch.uint8)),
        ("half", torch.randn(3, 5).bfloat16()),
        ("single", torch.randn(7)),
        ("other half", torch.randn(1).bfloat16()),
    ]
    ordered, places, size = wire_layout(tensors)
    assert [name for name, _ in ordered] == ["single", "half", "other half", "byte"]
    flat = fill(torch.zeros(size, dtype=torch.uint8), ordered, places)
    end = 0
    for (name, tensor), place in zip(ordered, places, strict=True):
        assert place.start_idx == end and end % tensor.element_size() == 0, name
        end = place.end_idx
        assert torch.equal(flat[place.start_idx : end].view(tensor.dtype).view(tensor.shape), tensor), name
    assert end == size == 7 * 4 + 15 * 2 + 2 + 5
