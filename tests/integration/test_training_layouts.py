"""What is trained does not depend on how it is laid out: micro-batches, data, context, tensor, pipeline parallel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import train_scenarios
from tiny_hf import make_model
from train_scenarios import PAIRS

from tests.support.gloo_world import GlooWorld

ONE_PROCESS = ["on_policy", "bf16", "infinite_gradient", "reset_optimizer_states", "stateless_adam"]
TWO_PROCESSES = [f"{layout}_{mode}" for layout, mode in PAIRS]


@pytest.fixture(scope="module")
def context(gloo_world: Callable[[int], GlooWorld], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The model's directory, and what one process with one sample per micro-batch computes."""
    root = tmp_path_factory.mktemp("layouts")
    context = {"root": str(root), "model": str(make_model("qwen3", root / "model"))}
    gloo_world(1).run(train_scenarios.scenario_reference, context)
    return context


@pytest.mark.parametrize("name", ONE_PROCESS)
def test_one_process(gloo_world: Callable[[int], GlooWorld], context: dict[str, str], name: str) -> None:
    """The first step is exactly on-policy; X13: an infinite gradient skips one step."""
    gloo_world(1).run(getattr(train_scenarios, f"scenario_{name}"), context)


@pytest.mark.parametrize("name", TWO_PROCESSES)
def test_two_processes(gloo_world: Callable[[int], GlooWorld], context: dict[str, str], name: str) -> None:
    """Log-probs, metrics and gradient norms equal those of one process with one sample per micro-batch."""
    gloo_world(2).run(train_scenarios.scenario_layout, context, name)
