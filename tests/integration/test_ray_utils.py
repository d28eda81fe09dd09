"""Waiting for several actors."""

from __future__ import annotations

import time

import pytest
import ray

from slime.ray.utils import Lock, acquire, get_all, release


@ray.remote(num_cpus=0)
class Worker:
    def fail(self) -> None:
        raise ValueError("rank 1 has failed")

    def hang(self) -> None:
        time.sleep(60)

    def answer(self, value: int) -> int:
        return value


def test_results_keep_their_order(ray_cluster: str) -> None:
    workers = [Worker.remote() for _ in range(2)]
    assert get_all([worker.answer.remote(i) for i, worker in enumerate(workers)], timeout=60) == [0, 1]


def test_the_first_failure_ends_the_wait(ray_cluster: str) -> None:
    """A rank that waits for a dead peer must not hide the peer's error."""
    hanging, failing = Worker.remote(), Worker.remote()
    ray.get(hanging.answer.remote(0), timeout=60)
    started = time.monotonic()
    with pytest.raises(ValueError, match="rank 1 has failed"):
        get_all([hanging.hang.remote(), failing.fail.remote()], timeout=50)
    assert time.monotonic() - started < 40
    ray.kill(hanging)


def test_a_deadline_says_how_many_were_late(ray_cluster: str) -> None:
    hanging = Worker.remote()
    with pytest.raises(TimeoutError, match="pushing: 1 of 1"):
        get_all([hanging.hang.remote()], timeout=1, what="pushing")
    ray.kill(hanging)


def test_lock_has_one_holder(ray_cluster: str) -> None:
    lock = ray.remote(Lock).options(num_cpus=0).remote()
    assert ray.get(lock.acquire.remote("a"))
    assert not ray.get(lock.acquire.remote("b"))
    ray.get(lock.release.remote())
    assert ray.get(lock.acquire.remote("b"))
    with pytest.raises(TimeoutError, match="c did not get the lock"):
        acquire(lock, "c", timeout=0.1)
    release(lock)
    acquire(lock, "c", timeout=5.0)
