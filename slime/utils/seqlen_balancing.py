"""Partition work into bins: balanced (Karmarkar-Karp), packed under a cap (first fit), split further."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[float], k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """Indices of `seqlen_list` in `k_partitions` non-empty parts with sums as equal as the heuristic gets them.

    Args:
        seqlen_list: the weight of each item.
        k_partitions: number of parts.
        equal_size: every part gets the same number of items.

    Raises:
        ValueError: fewer items than parts, or a number of items that `equal_size` can't divide.
    """
    parts = karmarkar_karp(seqlen_list, k_partitions, equal_size)
    return [sorted(part) for part in parts]


def karmarkar_karp(seqlen_list: Sequence[float], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """The largest-differencing method: merge the two most uneven partial partitions until one is left.

    Source: Karmarkar and Karp, "The Differencing Method of Set Partitioning" (1982); its balanced form, which starts
    from groups of k items and so keeps the counts equal: Michiels et al. (2003).
    """
    n = len(seqlen_list)
    if n < k_partitions:
        raise ValueError(f"can't make {k_partitions} non-empty parts of {n} items")
    if equal_size and n % k_partitions:
        raise ValueError(f"{n} items don't divide evenly into {k_partitions} parts")
    order = sorted(range(n), key=lambda i: (seqlen_list[i], i))
    groups = [order[i : i + k_partitions] for i in range(0, n, k_partitions)] if equal_size else [[i] for i in order]

    # A heap entry is (-spread, tie breaker, parts by falling weight); a part is (weight, items).
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for tie, group in enumerate(groups):
        parts = [(seqlen_list[i], [i]) for i in reversed(group)]
        parts += [(0, [])] * (k_partitions - len(parts))
        heap.append((parts[-1][0] - parts[0][0], tie, parts))
    heapq.heapify(heap)
    tie = len(groups)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        # the heaviest part of one joins the lightest of the other
        merged = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(first, reversed(second), strict=True)]
        merged.sort(key=lambda part: (-part[0], len(part[1])))
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], tie, merged))
        tie += 1
    return _fill_empty([items for _, items in heap[0][2]])


def _fill_empty(parts: list[list[int]]) -> list[list[int]]:
    """Give each empty part (they come from items of weight 0) an item of the part with the most items."""
    for part in parts:
        if not part:
            part.append(max(parts, key=len).pop())
    return parts


def first_fit_pack(total_lengths: Sequence[int], max_tokens_per_bin: int) -> list[list[int]]:
    """Put each item into the first bin that has room; an item longer than the cap gets a bin of its own.

    Items keep their order within a bin. Every bin but those of over-long items stays within the cap.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index, length in enumerate(total_lengths):
        slot = next((b for b, free in enumerate(room) if length <= free), None)
        if slot is None:
            bins.append([index])
            room.append(max_tokens_per_bin - length)
        else:
            bins[slot].append(index)
            room[slot] -= length
    return bins


def expand_bins_by_splitting(bins: list[list[int]], target_count: int, lengths: Sequence[float]) -> list[list[int]]:
    """Reach `target_count` bins by halving, again and again, the heaviest bin that holds more than one item.

    Raises:
        ValueError: there are fewer items than `target_count`.
    """
    if sum(map(len, bins)) < target_count:
        raise ValueError(f"can't make {target_count} non-empty bins of {sum(map(len, bins))} items")
    result = list(bins)
    heap = [(-sum(lengths[i] for i in items), slot) for slot, items in enumerate(result) if len(items) > 1]
    heapq.heapify(heap)
    while len(result) < target_count:
        _, slot = heapq.heappop(heap)
        halves = karmarkar_karp([lengths[i] for i in result[slot]], 2, equal_size=False)
        left, right = ([result[slot][i] for i in sorted(half)] for half in halves)
        result[slot] = left
        result.append(right)
        for place in (slot, len(result) - 1):
            if len(result[place]) > 1:
                heapq.heappush(heap, (-sum(lengths[i] for i in result[place]), place))
    return result
