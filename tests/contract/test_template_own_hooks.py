"""A template for tests of your own hooks: copy this file, and put your functions in place of the examples.

The first test checks what slime checks when a run starts: that each can be imported and called as slime calls it. The
others call the functions; write one for what each of yours is there for.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace

import pytest

from slime.utils.arguments.hooks import assert_hook
from slime.utils.misc import load_function
from slime.utils.types import Sample

# the flags of your run that name functions
MY_HOOKS = {
    "--custom-rm-path": "examples.hooks.rewards.exact_match",
    "--dynamic-sampling-filter-path": "examples.hooks.filters.mixed_rewards",
}


@pytest.mark.parametrize(("flag", "path"), MY_HOOKS.items())
def test_signature(flag: str, path: str) -> None:
    assert_hook(flag, path)


@pytest.mark.parametrize(("response", "reward"), [("4", 1.0), ("Let me see.\n4", 1.0), ("5", 0.0), ("", 0.0)])
def test_reward(response: str, reward: float) -> None:
    score = load_function(MY_HOOKS["--custom-rm-path"])
    sample = Sample(prompt="2+2=", response=response, label="4")
    assert asyncio.run(score(Namespace(), sample)) == reward


def test_filter() -> None:
    keep = load_function(MY_HOOKS["--dynamic-sampling-filter-path"])
    args = Namespace(reward_key=None)
    assert keep(args, [Sample(reward=1.0), Sample(reward=0.0)]).keep
    assert not keep(args, [Sample(reward=1.0), Sample(reward=1.0)]).keep
