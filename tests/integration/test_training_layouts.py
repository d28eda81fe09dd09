"""What is trained does not depend on how it is laid out: micro-batches, data, context, tensor, pipeline parallel."""

from __future__ import annotations

from pathlib import Path

import pytest
from gloo_workers import run_scenarios
from tiny_hf import make_model
from train_scenarios import PAIRS

ONE_PROCESS = ["reference", "on_policy", "bf16", "infinite_gradient"]
TWO_PROCESSES = [f"{layout}_{mode}" for layout, mode in PAIRS]


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("layouts")
    return {"root": str(root), "model": str(make_model("qwen3", root / "model"))}


@pytest.fixture(scope="module")
def one_process(context: dict[str, str]) -> dict[str, str | None]:
    return run_scenarios("train_scenarios", ONE_PROCESS, 1, context, Path(context["root"]) / "one")


@pytest.fixture(scope="module")
def two_processes(context: dict[str, str], one_process: dict[str, str | None]) -> dict[str, str | None]:
    assert one_process["reference"] is None, one_process["reference"]
    return run_scenarios("train_scenarios", TWO_PROCESSES, 2, context, Path(context["root"]) / "two")


@pytest.mark.parametrize("name", ONE_PROCESS)
def test_one_process(one_process: dict[str, str | None], name: str) -> None:
    """Packing does not matter; the first step is exactly on-policy; X13: an infinite gradient skips one step."""
    assert one_process[name] is None, one_process[name]


@pytest.mark.parametrize("name", TWO_PROCESSES)
def test_two_processes(two_processes: dict[str, str | None], name: str) -> None:
    """Log-probs, metrics and gradient norms equal those of one process with one sample per micro-batch."""
    assert two_processes[name] is None, two_processes[name]
