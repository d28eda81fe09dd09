"""Cursors over data sets, and the mix of several by weight. Both go on exactly where a saved state was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slime.utils.data import Dataset
from slime.utils.types import Sample


class PromptCursor:
    """A position in a data set that goes round it, epoch after epoch.

    Attributes:
        offset: position in the epoch's order.
        epoch_id: how often the data set was gone through.
        served: prompts handed out under the present weights.
    """

    def __init__(self, name: str, dataset: Dataset, weight: float, shuffle: bool) -> None:
        self.name, self.dataset, self.weight = name, dataset, weight
        self._shuffle = shuffle
        self.offset = self.served = self.epoch_id = 0
        self.go_to(0, 0)

    def go_to(self, epoch_id: int, offset: int) -> None:
        self.epoch_id, self.offset = epoch_id, offset
        if self._shuffle:
            self.dataset.shuffle(epoch_id)

    def take(self, count: int) -> list[Sample]:
        """The next prompts. There is one in each epoch: `Dataset` saw at least one that is short enough."""
        prompts: list[Sample] = []
        while len(prompts) < count:
            if self.offset >= len(self.dataset):
                self.go_to(self.epoch_id + 1, 0)
            taken, self.offset = self.dataset.take(self.offset, count - len(prompts))
            prompts += taken
        self.served += count
        return prompts

    def state(self) -> dict[str, Any]:
        return {
            "offset": self.offset,
            "epoch_id": self.epoch_id,
            "served": self.served,
            "weight": self.weight,
            "size": len(self.dataset),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go to a saved position; with another weight the count that the mix evens out begins anew.

        Raises:
            ValueError: the data set has another size, so the position means nothing.
        """
        if state["size"] != len(self.dataset):
            raise ValueError(
                f"{self.name}: the saved position is in a data set of {state['size']} prompts, this one has"
                f" {len(self.dataset)}"
            )
        self.go_to(state["epoch_id"], state["offset"])
        self.served = state["served"]


class PromptMix:
    """Prompts of several data sets in the ratio of their weights.

    The next prompt comes from the source that is furthest behind its share, so that in any stretch of n prompts each
    has its share of n to within one or two, and the order depends on nothing but weights and counts.
    """

    def __init__(self, cursors: Sequence[PromptCursor]) -> None:
        self.cursors = list(cursors)
        total = sum(cursor.weight for cursor in cursors)
        self._shares = [cursor.weight / total for cursor in cursors]

    def __len__(self) -> int:
        return sum(len(cursor.dataset) for cursor in self.cursors)

    def take(self, count: int) -> list[Sample]:
        """The next prompts, in the order of the mix."""
        if len(self.cursors) == 1:
            return self.cursors[0].take(count)
        order = self._choose(count)
        queues = [iter(cursor.take(order.count(i))) for i, cursor in enumerate(self.cursors)]
        return [next(queues[i]) for i in order]

    def _choose(self, count: int) -> list[int]:
        served = [cursor.served for cursor in self.cursors]
        order = []
        for total in range(sum(served) + 1, sum(served) + count + 1):
            behind = [share * total - done for share, done in zip(self._shares, served, strict=True)]
            chosen = behind.index(max(behind))
            served[chosen] += 1
            order.append(chosen)
        return order

    def state(self) -> dict[str, Any]:
        return {cursor.name: cursor.state() for cursor in self.cursors}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go to the saved position of every source.

        Raises:
            ValueError: the sources are others.
        """
        names = [cursor.name for cursor in self.cursors]
        if sorted(names) != sorted(state):
            raise ValueError(f"the saved position is in the data sets {sorted(state)}, these are {sorted(names)}")
        for cursor in self.cursors:
            cursor.load_state(state[cursor.name])
        if any(state[cursor.name]["weight"] != cursor.weight for cursor in self.cursors):
            for cursor in self.cursors:
                cursor.served = 0
