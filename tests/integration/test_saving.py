"""Background saves, retention, other layouts, and saves that are killed at random moments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import saving_scenarios
from tiny_hf import make_model

from tests.support.gloo_world import GlooWorld, run_ranks


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("saving")
    for name in ("qwen3", "qwen3_tied", "qwen3_moe"):
        make_model(name, root / "models" / name)
    return {"models": str(root / "models"), "out": str(root / "out"), "killed": str(root / "killed")}


@pytest.mark.parametrize("name", ["background", "retention"])
def test_one_process(gloo_world: Callable[[int], GlooWorld], context: dict[str, str], name: str) -> None:
    """A background save is the state of its moment; `--keep-checkpoints` never takes what the tracker names."""
    gloo_world(1).run(getattr(saving_scenarios, f"scenario_{name}"), context)


@pytest.mark.parametrize("name", ["background", "failing_writer", "retention", "moves_dense", "moves_moe"])
def test_two_processes(gloo_world: Callable[[int], GlooWorld], context: dict[str, str], name: str) -> None:
    """The same with ranks that share the writing; optimiser state moves over TP, PP, DP and EP changes."""
    gloo_world(2).run(getattr(saving_scenarios, f"scenario_{name}"), context)


def test_saves_that_are_killed(context: dict[str, str]) -> None:
    """SIGKILL at 20 random moments, in saves at once and in the background: what is left always loads and is whole."""
    run_ranks(saving_scenarios.kill_saves, 1, context)
    assert Path(context["killed"]).is_dir()
