"""Which differences between a saved schedule and a run's matter when the run goes on."""

from __future__ import annotations

import pytest

from slime.backends.megatron_utils.checkpoint_state import _without_effect


@pytest.mark.parametrize(
    ("style", "end_wd", "names"),
    [
        ("constant", 0.1, ["lr_decay_steps", "wd_incr_steps"]),
        ("cosine", 0.1, ["wd_incr_steps"]),
        ("constant", 0.2, ["lr_decay_steps"]),
        ("linear", 0.2, []),
    ],
)
def test_lengths_that_are_not_used_may_differ(style: str, end_wd: float, names: list[str]) -> None:
    """A run of constant rates that is complete can be continued with more rollouts."""
    assert _without_effect({"lr_decay_style": style, "start_wd": 0.1, "end_wd": end_wd}) == names
