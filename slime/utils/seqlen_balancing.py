"""Partition work into bins: balanced (Karmarkar-Karp), packed under a cap (first fit, balanced), split further."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Sequence
from typing import Any

_Part = tuple[float, int, Any]


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

    # A heap entry is (-spread, tie breaker, parts by falling weight); a part is (-weight, number of items, items as
    # nested pairs).
    heap: list[tuple[float, int, list[_Part]]] = []
    for tie, group in enumerate(groups):
        parts: list[_Part] = [(-seqlen_list[i], 1, i) for i in reversed(group)]
        parts += [(0, 0, None)] * (k_partitions - len(parts))
        heap.append((parts[0][0] - parts[-1][0], tie, parts))
    heapq.heapify(heap)
    tie = len(groups)
    by_weight = operator.itemgetter(0, 1)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heap[0]
        # the heaviest part of one joins the lightest of the other
        merged = [(a[0] + b[0], a[1] + b[1], (a[2], b[2])) for a, b in zip(first, reversed(second), strict=True)]
        merged.sort(key=by_weight)
        heapq.heapreplace(heap, (merged[0][0] - merged[-1][0], tie, merged))
        tie += 1
    return _fill_empty([_flatten(items) for _, _, items in heap[0][2]])


def _flatten(nested: Any) -> list[int]:
    items, waiting = [], [nested]
    while waiting:
        node = waiting.pop()
        if isinstance(node, tuple):
            waiting += node
        elif node is not None:
            items.append(node)
    return items


def _fill_empty(parts: list[list[int]]) -> list[list[int]]:
    """Give each empty part (they come from items of weight 0) an item of the part with the most items."""
    for part in parts:
        if not part:
            part.append(max(parts, key=len).pop())
    return parts


def first_fit_pack(total_lengths: Sequence[int], max_tokens_per_bin: int) -> list[list[int]]:
    """Put each item into the first bin that has room; an item longer than the cap gets a bin of its own.

    Items keep their order within a bin. Every bin but those of over-long items stays within the cap. Takes
    O(n log(bins)) time.
    """
    too_long = sum(length > max_tokens_per_bin for length in total_lengths)
    # two neighbours of first fit hold more than one cap together
    most_bins = min(len(total_lengths), 2 * (sum(total_lengths) // max(max_tokens_per_bin, 1)) + 1 + too_long)
    rooms = _Rooms(most_bins, max_tokens_per_bin)
    bins: list[list[int]] = []
    for index, length in enumerate(total_lengths):
        slot = rooms.first_with(length) if length <= max_tokens_per_bin else len(bins)
        if slot == len(bins):
            bins.append([])
        bins[slot].append(index)
        rooms.take(slot, length)
    return bins


class _Rooms:
    """The room left in each of `count` bins, as a tree of maxima: node i has the children 2i and 2i + 1."""

    def __init__(self, count: int, capacity: int) -> None:
        self._leaves = 1 << max(count - 1, 0).bit_length()
        self._tree = [capacity] * (2 * self._leaves)

    def first_with(self, amount: int) -> int:
        """The first bin with at least this much room; there must be one."""
        tree, node = self._tree, 1
        while node < self._leaves:
            node *= 2
            if tree[node] < amount:
                node += 1
        return node - self._leaves

    def take(self, slot: int, amount: int) -> None:
        tree, node = self._tree, slot + self._leaves
        tree[node] -= amount
        while node > 1:
            node //= 2
            largest = max(tree[2 * node], tree[2 * node + 1])
            if tree[node] == largest:
                return
            tree[node] = largest


def balanced_pack(
    weights: Sequence[float], lengths: Sequence[int], max_tokens_per_bin: int, at_least: int = 1
) -> list[list[int]]:
    """Bins of about equal weight that hold at most `max_tokens_per_bin` each, hardly more of them than needed.

    Longest processing time first (Graham 1969), with room: the longest item left goes to the lightest bin that has
    room for it. An item longer than the cap gets a bin of its own. Takes O(n log(bins)) time.

    Args:
        weights: of each item; they grow with the lengths.
        at_least: bins to begin with, where there are as many items; more of them leave room to balance.
    """
    order = sorted(range(len(weights)), key=lambda i: (-lengths[i], i))
    bins = [[i] for i in order if lengths[i] > max_tokens_per_bin]
    rest = order[len(bins) :]
    needed = len(bins) - (-sum(lengths[i] for i in rest) // max_tokens_per_bin)
    # a heap of (weight, bin, room), and bins that lack room for the present item in one of (-room, bin, weight)
    lightest = [(0.0, slot, max_tokens_per_bin) for slot in range(len(bins), min(max(needed, at_least), len(weights)))]
    bins += [[] for _ in lightest]
    full: list[tuple[int, int, float]] = []
    for i in rest:
        while full and -full[0][0] >= lengths[i]:
            room, slot, weight = heapq.heappop(full)
            heapq.heappush(lightest, (weight, slot, -room))
        while lightest and lightest[0][2] < lengths[i]:
            weight, slot, room = heapq.heappop(lightest)
            heapq.heappush(full, (-room, slot, weight))
        if not lightest:
            lightest.append((0.0, len(bins), max_tokens_per_bin))
            bins.append([])
        weight, slot, room = lightest[0]
        bins[slot].append(i)
        heapq.heapreplace(lightest, (weight + weights[i], slot, room - lengths[i]))
    return [sorted(items) for items in bins if items]


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
