"""Packed sequences as a few batches: attention over many short sequences costs one kernel call per batch, not each."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

_SMALLEST_STEP = 16  # tokens; lengths up to it share one batch
_LONGEST_FILLED = 256  # beyond, computing the filling costs more than the kernel call that it saves


@dataclass(frozen=True)
class SequenceBatch:
    """`count` sequences of `length` tokens each; `rows` [count * length] are their tokens' places in the pack.

    A sequence shorter than `length` is filled up at its end with its own last token. `rows` is a slice when the
    sequences lie side by side in the pack and need no filling.
    """

    count: int
    length: int
    rows: torch.Tensor | slice

    def take(self, packed: torch.Tensor) -> torch.Tensor:
        """[tokens, ...] → [count, length, ...]; a view when `rows` is a slice."""
        if isinstance(self.rows, slice):
            picked = packed[self.rows]
        else:
            picked = packed.index_select(0, self.rows.to(packed.device))
        return picked.unflatten(0, (self.count, self.length))


@dataclass(frozen=True)
class BatchPlan:
    """How a pack is split. `order` [tokens] maps a token of the pack to its row in the batches' joined rows.

    `order` is None when the joined rows are the pack already.
    """

    batches: tuple[SequenceBatch, ...]
    order: torch.Tensor | None

    def join(self, outputs: list[torch.Tensor]) -> torch.Tensor:
        """Outputs [count, length, ...] of each batch → [tokens, ...] in the pack's order, filling dropped."""
        flat = [output.flatten(0, 1) for output in outputs]
        joined = flat[0] if len(flat) == 1 else torch.cat(flat)
        return joined if self.order is None else joined.index_select(0, self.order.to(joined.device))


@functools.lru_cache(maxsize=64)  # every layer of a micro-batch asks for the same plan
def plan_batches(lengths: tuple[int, ...], fill: bool) -> BatchPlan:
    """Group sequences of a pack into batches.

    Args:
        lengths: tokens of each sequence, in the pack's order; zeros are allowed.
        fill: put short sequences of similar lengths into one batch by filling up the shorter ones (by less than a
            quarter, or to 16 tokens). Right for causal attention, where no token sees what follows. Else only equal
            lengths share a batch.
    """
    groups: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        if length > 0:
            groups.setdefault(_rounded(length) if fill else length, []).append(index)
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    batches: list[SequenceBatch] = []
    order = torch.empty(starts[-1], dtype=torch.long)
    joined = 0
    for members in groups.values():
        longest = max(lengths[i] for i in members)
        batches.append(_batch(members, longest, lengths, starts))
        for i in members:
            order[starts[i] : starts[i + 1]] = torch.arange(joined, joined + lengths[i])
            joined += longest
    in_order = joined == starts[-1] and bool((order == torch.arange(joined)).all())
    return BatchPlan(tuple(batches), None if in_order else order)


def _rounded(length: int) -> int:
    if length > _LONGEST_FILLED:
        return length
    step = max(_SMALLEST_STEP, (1 << (length.bit_length() - 1)) // 4)
    return -(-length // step) * step


def _batch(members: list[int], longest: int, lengths: tuple[int, ...], starts: list[int]) -> SequenceBatch:
    first, last = members[0], members[-1]
    unfilled = all(lengths[i] == longest for i in members)
    if unfilled and starts[last + 1] - starts[first] == longest * len(members):
        return SequenceBatch(len(members), longest, slice(starts[first], starts[last + 1]))
    ends = torch.tensor([lengths[i] - 1 for i in members])
    offsets = torch.minimum(torch.arange(longest)[None], ends[:, None])
    rows = torch.tensor([starts[i] for i in members])[:, None] + offsets
    return SequenceBatch(len(members), longest, rows.flatten())
