"""Writing Hugging Face tensors straight into the Megatron weight that they make up, instead of merging them first."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from slime.backends.megatron_utils.families.layout import QKV, GateUp, Layout, ModelShape


def fill_in_place(layout: Layout, parts: Sequence[Tensor], target: Tensor, shape: ModelShape) -> bool:
    """Copy `parts` to their places in `target`, a whole (unsharded) weight. False where that is not possible: the
    layout is not one of the two that take most of a model's bytes, or the sizes don't fit; nothing is written then.

    A subclass may arrange its parts in another way, so the types must be these.
    """
    rows = sum(part.shape[0] for part in parts)
    if rows != target.shape[0] or any(part.shape[1:] != target.shape[1:] for part in parts):
        return False
    if type(layout) is GateUp:
        places: Sequence[Tensor] = target.split([part.shape[0] for part in parts])
    elif type(layout) is QKV:
        groups, trailing = shape.num_query_groups, target.shape[1:]
        parts = [part.reshape(groups, -1, *trailing) for part in parts]
        places = target.view(groups, -1, *trailing).split([part.shape[1] for part in parts], dim=1)
    else:
        return False
    for place, part in zip(places, parts, strict=True):
        place.copy_(part)
    return True
