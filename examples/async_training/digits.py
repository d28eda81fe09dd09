"""A reward that a model with random weights can learn in minutes: the share of digits in its answer."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from slime.utils.types import Sample


async def share_of_digits(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    return sum(character.isdigit() for character in sample.response) / max(len(sample.response), 1)
