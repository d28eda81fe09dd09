"""Named timers."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from slime.observability.timer import Timer, inverse_timer, timer, with_defer
from slime.utils.misc import SingletonMeta


@pytest.fixture(autouse=True)
def fresh_timer() -> Iterator[None]:
    SingletonMeta.clear_instances(Timer)
    yield
    SingletonMeta.clear_instances(Timer)


def test_sums_until_reset() -> None:
    for _ in range(2):
        with timer("work"):
            time.sleep(0.01)
    assert 0.02 <= Timer().log_dict()["work"] < 0.5
    Timer().reset()
    assert Timer().log_dict() == {}


def test_decorator_forms() -> None:
    @timer
    def sort() -> str:
        return "done"

    @timer("other name")
    def other() -> None: ...

    assert sort() == "done"
    other()
    assert set(Timer().log_dict()) == {"sort", "other name"}


def test_starting_twice_and_ending_unstarted_assert() -> None:
    Timer().start("a")
    with pytest.raises(AssertionError, match="'a' was started twice"):
        Timer().start("a")
    with pytest.raises(AssertionError, match="'b' was ended but not started"):
        Timer().end("b")


def test_a_block_that_raises_is_still_timed() -> None:
    with pytest.raises(KeyError), timer("broken"):
        raise KeyError
    assert "broken" in Timer().log_dict()
    with timer("broken"):
        pass


def test_inverse_timer_measures_what_is_outside() -> None:
    with inverse_timer("wait"):
        time.sleep(0.05)
    time.sleep(0.01)
    with inverse_timer("wait"):
        waited = Timer().log_dict()["wait"]
    assert 0.01 <= waited < 0.05
    assert Timer().is_running("wait")


def test_with_defer_runs_after_an_error_too() -> None:
    calls: list[str] = []

    @with_defer(lambda: calls.append("deferred"))
    def fails() -> None:
        calls.append("body")
        raise ValueError

    with pytest.raises(ValueError):
        fails()
    assert calls == ["body", "deferred"]
