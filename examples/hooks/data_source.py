"""A data source: it hands out prompts, and goes on where it was when the run is resumed."""

from __future__ import annotations

import json
import random
from argparse import Namespace
from pathlib import Path

from slime.rollout.data_source import DataSource
from slime.utils.types import Sample


class Sums(DataSource):
    """Sums of two numbers without end. Give --disable-rollout-global-dataset too, as there is no data set."""

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self.made = 0

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """`num_samples` groups (prompts) of `--n-samples-per-prompt` samples each."""
        return [self._group() for _ in range(num_samples)]

    def _group(self) -> list[Sample]:
        random_numbers = random.Random(f"{self.args.rollout_seed}-{self.made}")
        first, second = random_numbers.randrange(100), random_numbers.randrange(100)
        start = self.made * self.args.n_samples_per_prompt
        group = [
            Sample(group_index=self.made, index=start + i, prompt=f"{first}+{second}=", label=str(first + second))
            for i in range(self.args.n_samples_per_prompt)
        ]
        self.made += 1
        return group

    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Groups that were cut off come back here (--partial-rollout)."""
        raise ValueError("sums that were cut off are not continued: run without --partial-rollout")

    def save(self, rollout_id: int) -> None:
        folder = Path(self.args.save, "rollout")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"sums_{rollout_id}.json").write_text(json.dumps(self.made))

    def load(self, rollout_id: int | None = None) -> None:
        if self.args.load and (file := Path(self.args.load, "rollout", f"sums_{rollout_id}.json")).is_file():
            self.made = json.loads(file.read_text())

    def __len__(self) -> int:
        return 100 * 100
