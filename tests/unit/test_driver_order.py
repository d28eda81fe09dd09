"""In which order the asynchronous driver asks for what; that the parts do it is tested in tests/e2e."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import train_async

BASE = {
    "num_rollout": 3,
    "num_rollout_per_epoch": None,
    "start_rollout_id": 0,
    "eval_interval": None,
    "skip_eval_before_train": False,
    "save_interval": None,
    "offload_train": False,
    "offload_rollout": False,
    "rollout_global_dataset": True,
    "update_weights_interval": 1,
    "use_fault_tolerance": False,
}


class Recorder:
    """Manager and training group at once: notes what is asked of it."""

    def __init__(self, keeps_generating: bool) -> None:
        self.calls: list[str] = []
        self._keeps_generating = keeps_generating

    def keeps_generating(self) -> bool:
        return self._keeps_generating

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self.calls.append(" ".join([name, *map(str, args[:1])]))


def calls(monkeypatch: pytest.MonkeyPatch, keeps_generating: bool = False, **changes: Any) -> list[str]:
    recorder = Recorder(keeps_generating)

    @contextmanager
    def manager(args: Namespace, pg: Any) -> Iterator[Recorder]:
        yield recorder

    monkeypatch.setattr(train_async, "create_placement_groups", lambda args: {"rollout": None})
    monkeypatch.setattr(train_async, "rollout_manager", manager)
    monkeypatch.setattr(train_async, "create_training_models", lambda args, pgs, manager: recorder)
    train_async.train(Namespace(**{**BASE, **changes}))
    return [call for call in recorder.calls if call != "clear_memory"]


def test_a_rollout_is_generated_while_the_one_before_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """L14: each once. Weights wait for what is being generated."""
    assert calls(monkeypatch) == [
        "start_generate 0", "generated 0",
        "start_generate 1", "train 0", "generated 1", "update_weights", "generated 1",
        "start_generate 2", "train 1", "generated 2", "update_weights", "generated 2",
        "train 2", "update_weights",
    ]  # fmt: skip


def test_weights_do_not_wait_for_a_rollout_function_that_keeps_generating(monkeypatch: pytest.MonkeyPatch) -> None:
    assert calls(monkeypatch, keeps_generating=True, num_rollout=2) == [
        "start_generate 0", "generated 0",
        "start_generate 1", "train 0", "update_weights", "generated 1",
        "train 1", "update_weights",
    ]  # fmt: skip


def test_weights_are_sent_at_the_interval_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    made = calls(monkeypatch, update_weights_interval=2, num_rollout=5)
    before = [made[position - 1] for position, call in enumerate(made) if call == "update_weights"]
    assert before == ["generated 2", "generated 4", "train 4"]


def test_the_data_state_is_saved_before_the_next_rollout_takes_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    made = calls(monkeypatch, save_interval=1, num_rollout=2)
    assert made[:6] == ["start_generate 0", "generated 0", "save 0", "start_generate 1", "train 0", "save_model 0"]


def test_evaluation_before_training_is_for_fresh_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """L15, L16."""
    assert calls(monkeypatch, eval_interval=2, num_rollout=1)[0] == "eval 0"
    assert calls(monkeypatch, eval_interval=2, start_rollout_id=2)[0] == "start_generate 2"
    assert calls(monkeypatch, eval_interval=2, skip_eval_before_train=True)[0] == "start_generate 0"
    assert calls(monkeypatch, eval_interval=2, num_rollout=0) == ["eval 0"]
    assert calls(monkeypatch, start_rollout_id=3) == []
