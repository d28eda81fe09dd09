"""Helpers that every layer uses."""

from __future__ import annotations

import pytest

from slime.utils.misc import Box, SingletonMeta, group_by, load_function, should_run_periodic_action


def test_load_function_returns_the_object() -> None:
    assert load_function("slime.utils.misc.Box") is Box


@pytest.mark.parametrize(
    ("path", "error", "part"),
    [
        ("nodots", ValueError, "package.module.attribute"),
        ("slime.utils.misc.nothing", ImportError, "nothing"),
        ("no_such_package.module.fn", ImportError, "no_such_package"),
    ],
)
def test_load_function_names_what_is_wrong(path: str, error: type[Exception], part: str) -> None:
    with pytest.raises(error, match=part):
        load_function(path)


@pytest.mark.parametrize(
    ("rollout_id", "interval", "per_epoch", "num_rollout", "due"),
    [
        (4, None, None, 5, False),
        (4, 100, None, 5, True),
        (3, 2, None, None, True),
        (2, 2, None, None, False),
        (2, 100, 3, None, True),
    ],
)
def test_periodic_actions(
    rollout_id: int, interval: int | None, per_epoch: int | None, num_rollout: int | None, due: bool
) -> None:
    assert should_run_periodic_action(rollout_id, interval, per_epoch, num_rollout) is due


def test_group_by_keeps_first_seen_order() -> None:
    assert group_by("abcab") == {"a": ["a", "a"], "b": ["b", "b"], "c": ["c"]}
    assert list(group_by([3, 1, 2], key=lambda x: x % 2)) == [1, 0]


def test_singletons_are_one_until_cleared() -> None:
    class Thing(metaclass=SingletonMeta):
        pass

    first = Thing()
    assert Thing() is first
    SingletonMeta.clear_instances(Thing)
    assert Thing() is not first
