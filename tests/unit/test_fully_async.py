"""The fully-async rollout function against an HTTP server that plays router and engine."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from slime.rollout import sglang_rollout
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.fully_async_rollout import generate_rollout_fully_async, worker_of
from slime.rollout.weight_version import version_number
from slime.utils.async_utils import run
from slime.utils.http_utils import close_client
from slime.utils.misc import SingletonMeta
from slime.utils.types import Sample
from tests.support.fake_engine import FakeEngine, answer
from tests.support.rollout_args import rollout_args
from tests.support.toy_tokenizer import byte_tokenizer

A, B = byte_tokenizer().encode("ab", add_special_tokens=False)


async def one(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    return 1.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("hf")
    byte_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    """On the process's loop, where the worker lives too."""
    engine = FakeEngine(lambda payload: answer([A], "a", version=engine.version))
    SingletonMeta.clear_instances(sglang_rollout.GenerateState)
    run(engine.__aenter__())
    yield engine
    engine._aborted.set()
    run(close_client())
    run(engine.__aexit__())
    SingletonMeta.clear_instances(sglang_rollout.GenerateState)


@pytest.fixture
def make(checkpoint: str, tmp_path: Path, engine: FakeEngine) -> Iterator[Callable[..., Any]]:
    """`make(**flags)` → (args, data source); their workers are stopped at the end."""
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps({"input": f"p{i}"}) + "\n" for i in range(100)))
    made = []

    def build(**flags: Any) -> tuple[Namespace, RolloutDataSourceWithBuffer]:
        folder = str(tmp_path / "ckpt")
        settings = {"custom_rm_path": f"{__name__}.one", "sglang_server_concurrency": 8, **flags}
        args = rollout_args(hf_checkpoint=checkpoint, prompt_data=str(prompts), save=folder, load=folder, **settings)
        args.sglang_router_port = engine.port
        made.append((args, RolloutDataSourceWithBuffer(args)))
        return made[-1]

    yield build
    for args, source in made:
        worker_of(args, source).stop()


def roll(args: Namespace, rollout_id: int, source: Any) -> RolloutFnTrainOutput:
    output = generate_rollout_fully_async(args, rollout_id, source)
    assert isinstance(output, RolloutFnTrainOutput)
    return output


def groups(output: RolloutFnTrainOutput) -> list[int]:
    return [group[0].group_index for group in output.samples]


def wait_until(condition: Callable[[], bool]) -> None:
    import time

    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_nothing_that_is_finished_is_lost(make: Callable[..., Any]) -> None:
    """L8: 4 groups in flight beside 2 that are taken; what is ready is served by the next call."""
    args, source = make()
    worker = worker_of(args, source)
    served = [groups(roll(args, i, source)) for i in range(4)]
    assert sorted(chain(*served)) == list(range(8))
    wait_until(lambda: worker.queue_size() == worker.most_outstanding)  # the queue fills, and not further
    assert worker.most_outstanding == 6 and worker.in_flight() == 0
    assert source.sample_group_index == 14


def test_stale_groups_are_generated_anew(make: Callable[..., Any], engine: FakeEngine) -> None:
    args, source = make(max_staleness=1)
    worker = worker_of(args, source)
    assert worker.most_outstanding == 4  # (1 + 1) batches of 2
    roll(args, 0, source)
    wait_until(lambda: worker.queue_size() == 4)
    engine.version = "4"
    output = roll(args, 1, source)
    assert output.metrics["rollout/fully_async/staleness_max"] == 1
    wait_until(lambda: worker.queue_size() == 4)
    engine.version = "6"
    output = roll(args, 2, source)
    assert output.metrics["rollout/fully_async/stale_groups"] == 4
    assert output.metrics["rollout/fully_async/staleness_max"] == 0
    assert {version for group in output.samples for s in group for version in s.weight_versions} == {"6"}
    assert groups(output)[0] == 4  # given back, so first in line


def test_a_checkpoint_holds_what_is_not_trained(make: Callable[..., Any], engine: FakeEngine) -> None:
    """Ready groups with their answers, groups in flight as prompts, and batches handed out after the checkpoint's."""
    args, source = make()
    worker = worker_of(args, source)
    first = roll(args, 0, source)
    wait_until(lambda: worker.queue_size() == 6)
    engine.hold = lambda payload: True
    later = roll(args, 1, source)  # taken, but the checkpoint is of rollout 0; its places are taken by held requests
    wait_until(lambda: worker.in_flight() == 2)
    source.save(0)
    asked = len(engine.requests)

    engine.hold = lambda payload: False
    engine.version = "1"  # numbers begin anew
    resumed_args, resumed = make()
    resumed.load(0)
    outputs = [roll(resumed_args, i, resumed) for i in range(1, 5)]
    assert sorted(chain(*map(groups, outputs))) == list(range(2, 10))
    assert set(groups(later)) <= set(range(2, 8)) and groups(first) == [0, 1]
    assert outputs[0].metrics["rollout/fully_async/staleness_max"] == 1  # the loaded weights are one update newer
    repeated = [r for r in engine.requests[asked:] if byte_tokenizer().decode(r["input_ids"]) in {"p2", "p7"}]
    assert repeated == [], "what was finished is not generated again"


def test_an_aborted_group_goes_on(make: Callable[..., Any], engine: FakeEngine) -> None:
    """Tokens so far are kept with --partial-rollout, and progress is no failed attempt."""
    tries: list[int] = []

    def reply(payload: dict[str, Any]) -> dict[str, Any]:
        tries.append(len(payload["input_ids"]))
        done = len(payload["input_ids"]) >= 9
        return answer([A], "a", "stop" if done else "abort")

    engine.reply = reply
    args, source = make(partial_rollout=True, n_samples_per_prompt=1, rollout_max_response_len=20)
    output = roll(args, 0, source)
    assert all(sample.response == "a" * 8 for group in output.samples for sample in group)
    assert output.metrics["rollout/aborted_groups_retried"] >= 14


def fail_on_third(args: Namespace, sample: Sample) -> None:
    if sample.group_index == 3:
        raise ZeroDivisionError("in the hook")


def test_a_failing_group_ends_the_run(make: Callable[..., Any]) -> None:
    args, source = make(rollout_sample_hook_path=[f"{__name__}.fail_on_third"])
    with pytest.raises(ZeroDivisionError, match="in the hook"):
        for rollout_id in range(9):
            roll(args, rollout_id, source)


def test_a_broken_row_ends_the_run(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is met between rollouts, where nobody waits."""
    args, source = make()
    take = source.prompts.take

    def breaks_at_ninth(count: int) -> list[Sample]:
        if source.sample_group_index >= 9:
            raise ValueError("p.jsonl:10: broken JSON")
        return take(count)

    monkeypatch.setattr(source.prompts, "take", breaks_at_ninth)
    with pytest.raises(ValueError, match=r"p\.jsonl:10: broken JSON"):
        for rollout_id in range(9):
            roll(args, rollout_id, source)
    monkeypatch.setattr(source.prompts, "take", take)


def test_shared_devices_are_idle_between_rollouts(make: Callable[..., Any], engine: FakeEngine) -> None:
    args, source = make(offload_rollout=True, partial_rollout=True)
    held = {"p3", "p4"}
    engine.hold = lambda payload: byte_tokenizer().decode(payload["input_ids"]) in held
    engine.partial = [B]
    roll(args, 0, source)
    worker = worker_of(args, source)
    assert worker.in_flight() == 0 and engine.aborts >= 1
    held.clear()
    rest = [roll(args, i, source) for i in (1, 2, 3)]
    assert "ba" in {sample.response for output in rest for group in output.samples for sample in group}


def drop_even(args: Namespace, group: list[Sample], **kwargs: Any) -> bool:
    return group[0].group_index % 2 == 1


def test_the_dynamic_filter_holds_here_too(make: Callable[..., Any]) -> None:
    args, source = make(dynamic_sampling_filter_path=f"{__name__}.drop_even")
    output = roll(args, 0, source)
    assert all(index % 2 == 1 for index in groups(output))


def test_evaluation_runs_beside_it(make: Callable[..., Any], engine: FakeEngine, tmp_path: Path) -> None:
    from slime.utils.eval_config import EvalDatasetConfig

    args, source = make()
    engine.hold = lambda payload: byte_tokenizer().decode(payload["input_ids"]) in {"p2", "p3"}
    roll(args, 0, source)
    (tmp_path / "eval.jsonl").write_text('{"input": "e"}\n')
    args.eval_datasets = [EvalDatasetConfig(name="e", path=str(tmp_path / "eval.jsonl"), max_response_len=4)]
    output = generate_rollout_fully_async(args, 0, source, evaluation=True)
    assert output.data["e"]["rewards"] == [1.0] and worker_of(args, source).in_flight() >= 2


def test_versions_are_numbers() -> None:
    assert version_number("default") == 0 and version_number("12") == 12
    with pytest.raises(ValueError, match="'v2' of an engine is no number"):
        version_number("v2")
