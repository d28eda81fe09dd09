"""Engines that die or hang are replaced. Engines and router stand in for real ones, so that each fault is quick and
exact; tests/e2e/test_chaos.py does it to real ones."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray

from slime.backends.sglang_utils.sglang_config import ModelConfig, ServerGroupConfig
from slime.ray.engine_group import RolloutServer
from slime.ray.engine_recovery import EngineRecovery
from slime.ray.placement_group import Placement
from slime.ray.server_group import ServerGroup
from slime.utils.health_monitor import RolloutHealthMonitor
from tests.support.stand_in_engine import StandInEngine

WAIT_S = 40.0


class StandInGroup(ServerGroup):
    """Two places for engines; `broken` says which start fails, counted from 0."""

    starts = 0
    broken: int = -1

    def start_engines(self, register: bool = True) -> dict[int, list[Any]]:
        started = {}
        for number, engine in enumerate(self.all_engines):
            if engine is None:
                actor = ray.remote(StandInEngine).options(num_cpus=0, max_concurrency=8)
                self.all_engines[number] = actor.remote(f"e{self.starts}", self.starts == self.broken)
                started[number] = [self.all_engines[number].init.remote()]
                self.starts += 1
        self.num_new_engines += len(started)
        return started


class StandInRouter:
    """What the recovery needs of a router; nothing listens at its address."""

    url, ip, port = "http://127.0.0.1:9", "127.0.0.1", 9
    has_ended = False
    restarts = 0

    def restart(self) -> None:
        self.has_ended = False
        self.restarts += 1

    def wait_workers(self, urls: list[str], timeout: float) -> None:
        return

    def stop(self) -> None:
        return


class Setting:
    """A server with two engines that serve."""

    def __init__(self, trained: bool = True) -> None:
        self.args = Namespace(
            num_gpus_per_node=8,
            engine_start_timeout=WAIT_S,
            rollout_health_check_interval=0.2,
            rollout_health_check_timeout=1.0,
            rollout_health_check_first_wait=0.0,
        )
        self.router = StandInRouter()
        config = ServerGroupConfig(num_gpus=2, num_gpus_per_engine=1)
        placement = Placement(None, [0, 1], [0, 1])
        self.group = StandInGroup(self.args, placement, config, "m", self.router, 0, 0, False)  # type: ignore[arg-type]
        self.group.start_engines()
        model = ModelConfig("m", "m", (config,), update_weights=trained)
        self.server = RolloutServer(self.args, model, self.router, [self.group], [])  # type: ignore[arg-type]
        self.server.num_new_engines = 0
        self.recovery = EngineRecovery(self.args, self.server)
        self.monitor = RolloutHealthMonitor(self.recovery, self.args)

    def names(self) -> list[str]:
        """The engines that serve."""
        urls = ray.get([engine.get_url.remote() for engine in self.recovery.serving()])
        return sorted(url.rpartition("/")[2] for url in urls)


@pytest.fixture
def make_setting(ray_cluster: str) -> Iterator[Callable[..., Setting]]:
    made: list[Setting] = []

    def make(**options: Any) -> Setting:
        made.append(Setting(**options))
        return made[-1]

    yield make
    for setting in made:
        setting.monitor.stop()
        setting.server.kill()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_dead_engine_is_replaced_and_serves_after_it_has_weights(make_setting: Callable[..., Setting]) -> None:
    """P17: one engine dies: one start, and trainers connect to one new engine, once."""
    setting = make_setting()
    setting.monitor.start()
    ray.get(setting.group.engine(0).die.remote())
    wait_for(lambda: setting.names() == ["e1"])
    assert setting.group.numbers == [1] and setting.server.engine_gpu_offsets == [1]

    setting.recovery.recover()
    assert setting.group.numbers == [0, 1] and setting.server.num_new_engines == 1
    assert setting.names() == ["e1"], "the new one has no weights yet"
    setting.server.num_new_engines = 0
    setting.recovery.admit()
    assert setting.names() == ["e1", "e2"] and setting.group.starts == 3
    assert ray.get(setting.group.engine(0).registrations.remote()) == 1
    assert setting.recovery.pop_counts() == {"rollout/engine_failures": 1}
    assert setting.recovery.pop_counts() == {}


def test_a_killed_actor_counts_as_a_dead_engine(make_setting: Callable[..., Setting]) -> None:
    setting = make_setting()
    setting.monitor.start()
    ray.kill(setting.group.engine(1))
    wait_for(lambda: len(setting.recovery.serving()) == 1)


def test_a_hung_engine_is_found_by_probes_alone(make_setting: Callable[..., Setting]) -> None:
    """Probes count while engines generate, not while they are paused."""
    setting = make_setting()
    setting.monitor.start()
    ray.get(setting.group.engine(0).hang.remote())
    assert not setting.monitor.is_checking_enabled()
    assert setting.names() == ["e0", "e1"]
    setting.monitor.resume()
    wait_for(lambda: setting.names() == ["e1"])


def test_before_weights_are_sent_a_hung_engine_is_found_without_the_monitor(
    make_setting: Callable[..., Setting],
) -> None:
    setting = make_setting()
    assert not setting.recovery.retire_silent()
    ray.get(setting.group.engine(1).hang.remote())
    assert setting.recovery.retire_silent()
    assert setting.names() == ["e0"]


def test_the_loss_of_all_engines_is_told(make_setting: Callable[..., Setting]) -> None:
    setting = make_setting()
    for engine in setting.recovery.serving():
        assert not setting.recovery.lost.is_set()
        setting.recovery.retire(engine, "test")
    assert setting.recovery.lost.is_set()
    setting.recovery.recover()
    setting.recovery.admit()
    assert not setting.recovery.lost.is_set() and setting.names() == ["e2", "e3"]


def test_an_engine_that_does_not_start_is_left_out(make_setting: Callable[..., Setting]) -> None:
    """The others go on, trainers must connect anew, and the next recovery tries again."""
    setting = make_setting()
    setting.group.broken = 2
    setting.recovery.retire(setting.group.engine(0), "test")
    setting.recovery.recover()
    assert setting.group.numbers == [1] and setting.server.num_new_engines == 1
    setting.recovery.admit()
    setting.recovery.recover()
    setting.recovery.admit()
    assert setting.names() == ["e1", "e3"]
    assert setting.recovery.pop_counts()["rollout/engine_failed_starts"] == 1


def test_no_engine_at_all_is_an_error_with_its_cause(make_setting: Callable[..., Setting]) -> None:
    setting = make_setting()
    setting.group.all_engines[1] = None  # leaves one place, whose engine won't start
    setting.group.all_engines = setting.group.all_engines[:1]
    setting.recovery = EngineRecovery(setting.args, setting.server)
    setting.group.broken = 2
    setting.recovery.retire(setting.group.engine(0), "test")
    with pytest.raises(RuntimeError, match="no engine of model 'm' is left") as caught:
        setting.recovery.recover()
    assert "e2 has no memory" in str(caught.value.__cause__)


def test_engines_without_trained_weights_are_replaced_at_once(make_setting: Callable[..., Setting]) -> None:
    setting = make_setting(trained=False)
    setting.monitor.start()
    ray.get(setting.group.engine(0).die.remote())
    wait_for(lambda: setting.names() == ["e1", "e2"])


def test_a_dead_router_is_started_again_and_told_of_the_engines(make_setting: Callable[..., Setting]) -> None:
    setting = make_setting()
    setting.router.has_ended = True
    setting.monitor.start()
    wait_for(lambda: setting.recovery.counts["router_restarts"] == 1 and not setting.router.has_ended)
    wait_for(lambda: ray.get([e.registrations.remote() for e in setting.recovery.serving()]) == [1, 1])
