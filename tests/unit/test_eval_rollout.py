"""Evaluation: whose settings win, and a run against a real HTTP server."""

from __future__ import annotations

import asyncio
import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slime.observability.eval_samples import save_eval_samples
from slime.observability.rollout_metrics import log_eval_rollout_data
from slime.rollout import sglang_rollout
from slime.rollout.base_types import RolloutFnEvalOutput
from slime.rollout.eval_rollout import EVAL_PROMPT_DATASET
from slime.rollout.rm_hub.grader_pool import close_grader_pool
from slime.utils.eval_config import build_eval_dataset_configs, ensure_dataset_list, resolve_eval_datasets
from slime.utils.http_utils import close_client
from slime.utils.misc import SingletonMeta
from slime.utils.types import Sample
from tests.support.fake_engine import FakeEngine, answer
from tests.support.rollout_args import rollout_args
from tests.support.toy_tokenizer import byte_tokenizer

ENTRIES = [{"name": "A", "path": "a.jsonl"}, {"name": "B", "path": "b.jsonl", "rm_type": "dapo"}]


def test_entry_over_defaults_over_flags() -> None:
    """L17"""
    args = rollout_args(rollout_temperature=0.8)
    args.eval_top_p = 0.9
    a, b = build_eval_dataset_configs(args, ENTRIES, {"rm_type": "math", "stop": ["X"]})
    assert (a.rm_type, a.stop) == ("math", ["X"]) and (b.rm_type, b.stop) == ("dapo", ["X"])
    assert a.temperature == 0.8 and a.top_p == 0.9 and a.max_response_len == 8 and a.input_key == "input"
    assert b.inject_metadata({"rm_type": "row", "x": 1}) == {"rm_type": "dapo", "x": 1}


@pytest.mark.parametrize("place", ["entry", "defaults"])
def test_a_typo_lists_the_valid_keys(place: str) -> None:
    """L17"""
    typo = {"tempurature": 1.0}
    entries = [ENTRIES[0] | (typo if place == "entry" else {})]
    with pytest.raises(ValueError, match=r"unknown key 'tempurature'; did you mean 'temperature'\? .*top_k"):
        build_eval_dataset_configs(rollout_args(), entries, typo if place == "defaults" else {})


def test_other_mistakes() -> None:
    with pytest.raises(ValueError, match="the name is there twice"):
        build_eval_dataset_configs(rollout_args(), [ENTRIES[0], ENTRIES[0]], {})
    with pytest.raises(ValueError, match="path is missing"):
        build_eval_dataset_configs(rollout_args(), [{"name": "A"}], {})
    with pytest.raises(ValueError, match="must be a list or a mapping"):
        ensure_dataset_list("a.jsonl")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"temperature": "0.6"}, r"eval dataset 'A': temperature must be float \| None, got '0.6' \(str\)"),
        ({"top_p": 1.5}, "top_p must be above 0 and at most 1, got 1.5"),
        ({"n_samples_per_eval_prompt": 0}, "n_samples_per_eval_prompt must be at least 1, got 0"),
        ({"n_samples_per_eval_prompt": None}, "n_samples_per_eval_prompt must be int, got None"),
        ({"apply_chat_template": 1}, "apply_chat_template must be bool, got 1"),
        ({"stop_token_ids": ["x"]}, "stop_token_ids must be"),
        ({"metadata_overrides": []}, "metadata_overrides must be"),
    ],
)
def test_values_of_the_wrong_kind(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_eval_dataset_configs(rollout_args(), [ENTRIES[0] | entry], {})


def test_a_single_stop_is_a_list_of_one() -> None:
    (config,) = build_eval_dataset_configs(rollout_args(), [ENTRIES[0] | {"stop": "X", "temperature": 1}], {})
    assert config.stop == ["X"] and config.temperature == 1


@pytest.mark.parametrize("root", ["eval:\n  ", ""])
def test_yaml(tmp_path: Path, root: str) -> None:
    indent = "  " if root else ""
    text = f"{root}datasets:\n{indent}  aime: {{path: a.jsonl, n_samples_per_eval_prompt: 4}}\n{indent}  b: b.jsonl\n"
    (tmp_path / "eval.yaml").write_text(text + f"{indent}defaults: {{temperature: 0.6}}\n")
    configs = resolve_eval_datasets(rollout_args(eval_config=str(tmp_path / "eval.yaml")))
    assert [(c.name, c.path, c.temperature) for c in configs] == [("aime", "a.jsonl", 0.6), ("b", "b.jsonl", 0.6)]
    assert configs[0].n_samples_per_eval_prompt == 4


def test_pairs_and_a_single_path() -> None:
    pairs = resolve_eval_datasets(rollout_args(eval_prompt_data=["x", "x.jsonl", "y", "y.jsonl"]))
    assert [(config.name, config.path) for config in pairs] == [("x", "x.jsonl"), ("y", "y.jsonl")]
    assert resolve_eval_datasets(rollout_args(eval_prompt_data=["z.jsonl"]))[0].name == "aime"
    assert resolve_eval_datasets(rollout_args()) == []


@pytest.fixture(autouse=True, scope="module")
def graders() -> Iterator[None]:
    yield
    close_grader_pool()


@pytest.fixture
def args(tmp_path: Path) -> Namespace:
    SingletonMeta.clear_instances(sglang_rollout.GenerateState)
    EVAL_PROMPT_DATASET.clear()
    byte_tokenizer().save_pretrained(tmp_path)
    rows = [{"input": f"q{i}", "label": str(i)} for i in range(3)]
    (tmp_path / "e.jsonl").write_text("\n".join(map(json.dumps, rows)))
    entry = {"name": "e", "path": str(tmp_path / "e.jsonl"), "label_key": "label", "n_samples_per_eval_prompt": 2}
    entry |= {"temperature": 0.0, "max_response_len": 4, "rm_type": "f1"}
    made = rollout_args(hf_checkpoint=str(tmp_path), rm_type="math")
    made.eval_datasets = build_eval_dataset_configs(made, [entry], {})
    return made


def evaluate(args: Namespace, engine: FakeEngine) -> Any:
    async def body() -> Any:
        async with engine:
            args.sglang_router_port = engine.port
            try:
                return (await sglang_rollout.eval_rollout(args, 3))[0].data
            finally:
                await close_client()

    return asyncio.run(body())


def echo(payload: dict[str, Any]) -> dict[str, Any]:
    text = byte_tokenizer().decode(payload["input_ids"])[1:]
    finish = "length" if text == "2" else "stop"
    return answer(byte_tokenizer().encode(text, add_special_tokens=False), text, finish)


def test_results_in_order_with_the_data_set_s_own_settings(args: Namespace) -> None:
    engine = FakeEngine(echo)
    result = evaluate(args, engine)["e"]
    assert result["rewards"] == [1.0] * 6 and result["truncated"] == [False] * 4 + [True] * 2
    assert [sample.prompt for sample in result["samples"]] == ["q0", "q0", "q1", "q1", "q2", "q2"]
    params = engine.requests[0]["sampling_params"]
    assert params["temperature"] == 0.0 and params["max_new_tokens"] == 4 and "stop" not in params


def test_data_sets_at_once_with_their_own_number_of_answers(args: Namespace, tmp_path: Path) -> None:
    """Two data sets in one evaluation: rewards, samples, metrics and files of each."""
    rows = [{"input": "q1", "label": "1"}, {"input": "qx", "label": "9"}]
    (tmp_path / "g.jsonl").write_text("\n".join(map(json.dumps, rows)))
    entry = {"name": "g/h", "path": str(tmp_path / "g.jsonl"), "label_key": "label", "rm_type": "f1"}
    entry["n_samples_per_eval_prompt"] = 4
    args.eval_datasets += build_eval_dataset_configs(args, [entry], {"metadata_overrides": {"split": "test"}})
    data = evaluate(args, FakeEngine(echo))
    assert data["g/h"]["rewards"] == [1.0] * 4 + [0.0] * 4 and len(data["e"]["rewards"]) == 6
    args.log_passrate, args.log_dir = True, str(tmp_path)
    metrics = log_eval_rollout_data(3, args, data)
    assert metrics["eval/g/h-pass@1"] == metrics["eval/g/h-pass@4"] == metrics["eval/g/h-mean@4"] == 0.5
    assert metrics["eval/e-mean@2"] == 1.0 and metrics["eval/e-truncated_ratio"] == pytest.approx(1 / 3)

    paths = save_eval_samples(tmp_path, 3, data)
    assert paths == [tmp_path / "eval" / "e" / "3.jsonl", tmp_path / "eval" / "g%2Fh" / "3.jsonl"]
    lines = [json.loads(line) for line in paths[1].read_text().splitlines()]
    assert len(lines) == 8 and lines[4]["prompt"] == "qx" and lines[4]["response"] == "x"
    assert (lines[4]["label"], lines[4]["reward"], lines[4]["status"]) == ("9", 0.0, "completed")
    assert lines[4]["metadata"]["split"] == "test" and lines[4]["group_index"] == 1
    last = json.loads(paths[0].read_text().splitlines()[-1])
    assert (last["status"], last["response_length"]) == ("truncated", 1)


def test_the_manager_writes_the_answers(args: Namespace, tmp_path: Path) -> None:
    from slime.ray.placement_group import Placement
    from slime.ray.rollout import RolloutManager

    data = evaluate(args, FakeEngine(echo))
    args.log_dir, args.save_debug_rollout_data = str(tmp_path / "logs"), None
    manager = RolloutManager(args, Placement(None, [], []))  # not started: router and engines have no part in this
    manager.data_source = None
    manager.eval_generate_rollout = lambda *_, evaluation: RolloutFnEvalOutput(data=data)
    assert manager.eval(7)["eval/e"] == 1.0
    assert len((tmp_path / "logs" / "eval" / "e" / "7.jsonl").read_text().splitlines()) == 6
    manager.eval(7)  # as before and after the first rollout: neither replaces the other
    names = sorted(path.name for path in (tmp_path / "logs" / "eval" / "e").iterdir())
    assert names == ["7-2.jsonl", "7.jsonl"]


@pytest.mark.parametrize("limit", [None, 1])
def test_a_data_set_without_rows_is_an_error(args: Namespace, limit: int | None) -> None:
    args.eval_max_prompt_len = limit
    if limit is None:
        Path(args.eval_datasets[0].path).write_text("")
    with pytest.raises(ValueError, match=r"e\.jsonl"):
        evaluate(args, FakeEngine(echo))


async def failing_reward(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    if sample.index == 3:
        raise ZeroDivisionError("division by zero")
    return float("nan") if sample.index == 4 else 1.0


def test_a_reward_that_fails_is_named(args: Namespace) -> None:
    args.eval_datasets[0].custom_rm_path = f"{__name__}.failing_reward"
    expected = r"evaluation on e: sample (3 .*ZeroDivisionError: .*failing_reward|4 .*failing_reward is nan)"
    with pytest.raises((RuntimeError, ValueError), match=expected):
        evaluate(args, FakeEngine(echo))


def test_gradings_that_fail_are_counted(args: Namespace) -> None:
    args.eval_datasets[0].rm_type = "math"

    def hostile(payload: dict[str, Any]) -> dict[str, Any]:
        text = r"\boxed{(999!)!+x}"
        return answer(byte_tokenizer().encode(text, add_special_tokens=False), text, "stop")

    Path(args.eval_datasets[0].path).write_text(json.dumps({"input": "q", "label": "x"}))
    data = evaluate(args, FakeEngine(hostile))
    assert log_eval_rollout_data(0, args, data)["eval/e/grader_error"] == 2


def test_an_aborted_answer_is_an_error(args: Namespace) -> None:
    with pytest.raises(RuntimeError, match=r"evaluation on e: 6 answers were aborted: sample 0"):
        evaluate(args, FakeEngine(lambda payload: answer([], "", "abort")))


async def dict_reward(args: Namespace, sample: Sample, **kwargs: Any) -> dict[str, float]:
    return {"acc": 1.0, "other": 0.0}


def test_the_eval_key_picks_the_reward(args: Namespace) -> None:
    args.custom_rm_path, args.eval_reward_key = f"{__name__}.dict_reward", "acc"
    assert evaluate(args, FakeEngine(echo))["e"]["rewards"] == [1.0] * 6


def test_group_rm_has_no_default_evaluation(args: Namespace) -> None:
    args.group_rm = True
    with pytest.raises(ValueError, match="set --eval-function-path"):
        evaluate(args, FakeEngine(echo))
