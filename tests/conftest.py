"""Fixtures for all tests. Everything is real: Ray, gloo, an SGLang server, `train.py`. Slow parts start once."""

from __future__ import annotations

import os
import secrets
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support import leftovers
from tests.support.gloo_world import GlooWorld
from tests.support.tiny_model import TinyModel
from tests.support.train_cli import TrainCli

if TYPE_CHECKING:
    from tests.support.engine import SGLangServer, SharedEngine

# Cheap tests first, so that a plain mistake shows at once.
TIERS = ["unit", "contract", "integration", "e2e"]
CLUSTER_CPUS = 16
LEFTOVER_WAIT_S = 20.0

SHARED_ENGINE = pytest.StashKey["SharedEngine"]()
TINY_MODEL = pytest.StashKey[TinyModel]()


def pytest_configure(config: pytest.Config) -> None:
    """One environment for every test and every process that tests start, whatever the user's shell has set."""
    for name in ("RAY_ADDRESS", "WANDB_MODE", "WANDB_API_KEY", "TENSORBOARD_DIR"):
        os.environ.pop(name, None)
    os.environ[leftovers.SESSION_MARKER] = uuid.uuid4().hex
    # On a busy machine Ray would kill workers for the memory of others.
    os.environ["RAY_memory_monitor_refresh_ms"] = "0"  # noqa: SIM112 (Ray's spelling)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Processes that are older than the cluster join it too, so its token is made first.
    os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"] = "token", secrets.token_hex(32)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("SLIME_ACCELERATOR", "cpu")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: next((i for i, tier in enumerate(TIERS) if tier in item.path.parts), len(TIERS)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """The engine takes most of a minute to start: begin now if a test will want it."""
    wanted = any("sglang_server" in getattr(item, "fixturenames", ()) for item in session.items)
    if wanted and not session.config.option.collectonly:
        _shared_engine(session.config).start_early()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Stop the engine, then fail the run if any process that tests started is still there."""
    if (engine := session.config.stash.get(SHARED_ENGINE, None)) is not None:
        engine.stop()
    marker = os.environ[leftovers.SESSION_MARKER]
    left = leftovers.wait_until_none(
        lambda: leftovers.marked_processes(leftovers.SESSION_MARKER, marker), LEFTOVER_WAIT_S
    )
    if left:
        print(f"\nprocesses that the tests left behind:\n{leftovers.describe(left)}")
        leftovers.kill(left)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def tiny_model_dir(request: pytest.FixtureRequest) -> Path:
    """A tiny model with its tokenizer in Hugging Face format. Read-only."""
    return _tiny_model(request.config).path()


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[str]:
    """Address of the run's one Ray cluster. This process is connected; `train.py` joins it through RAY_ADDRESS."""
    import ray

    ray.init(num_cpus=CLUSTER_CPUS, include_dashboard=False, object_store_memory=512 * 1024**2, log_to_driver=False)
    address = ray.get_runtime_context().gcs_address
    os.environ["RAY_ADDRESS"] = address
    yield address
    del os.environ["RAY_ADDRESS"]
    ray.shutdown()


@pytest.fixture(scope="session")
def sglang_server(request: pytest.FixtureRequest) -> SGLangServer:
    """The run's one SGLang server, on the tiny model; stopped when the run ends."""
    return _shared_engine(request.config).ready()


@pytest.fixture(scope="session")
def gloo_world() -> Iterator[Callable[[int], GlooWorld]]:
    """`gloo_world(n)` is the pool of n processes: `gloo_world(2).run(function, *args)` → results by rank."""
    worlds: dict[int, GlooWorld] = {}

    def world(size: int) -> GlooWorld:
        if size not in worlds:
            worlds[size] = GlooWorld(size)
        return worlds[size]

    yield world
    for each in worlds.values():
        each.close()


@pytest.fixture
def train_cli(tmp_path: Path) -> Iterator[TrainCli]:
    """Runs `train.py` as a user would; request `ray_cluster` too for runs that join the shared cluster."""
    cli = TrainCli(tmp_path)
    yield cli
    cli.close()


def _tiny_model(config: pytest.Config) -> TinyModel:
    if TINY_MODEL not in config.stash:
        config.stash[TINY_MODEL] = TinyModel(_run_folder(config) / "tiny-model")
    return config.stash[TINY_MODEL]


def _shared_engine(config: pytest.Config) -> SharedEngine:
    from tests.support.engine import SharedEngine

    if SHARED_ENGINE not in config.stash:
        config.stash[SHARED_ENGINE] = SharedEngine(_tiny_model(config), _run_folder(config) / "engine")
    return config.stash[SHARED_ENGINE]


def _run_folder(config: pytest.Config) -> Path:
    """pytest's temporary folder of this run; it keeps the last three."""
    factory: pytest.TempPathFactory = config._tmp_path_factory  # no public way outside fixtures
    return factory.getbasetemp()
