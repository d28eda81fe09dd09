"""Data sources: numbering, epochs, the buffer, and exact resume."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime.rollout.data_source import RolloutDataSource, RolloutDataSourceWithBuffer
from slime.utils.types import Sample
from tests.support.rollout_args import rollout_args
from tests.support.toy_tokenizer import byte_tokenizer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("hf")
    byte_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture
def args(checkpoint: str, tmp_path: Path) -> Namespace:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"input": f"p{i}"}) for i in range(5)))
    folder = str(tmp_path / "ckpt")
    return rollout_args(hf_checkpoint=checkpoint, prompt_data=str(prompts), save=folder, load=folder)


def prompts(groups: list[list[Sample]]) -> list[Any]:
    return [group[0].prompt for group in groups]


def test_groups_are_numbered_through_epochs(args: Namespace) -> None:
    source = RolloutDataSource(args)
    groups = source.get_samples(3) + source.get_samples(4)
    assert prompts(groups) == ["p0", "p1", "p2", "p3", "p4", "p0", "p1"]
    assert [group[0].group_index for group in groups] == list(range(7))
    assert [sample.index for group in groups for sample in group] == list(range(14))
    assert source.epoch_id == 1 and len(source) == 5


def test_one_call_may_span_several_epochs(args: Namespace) -> None:
    source = RolloutDataSource(args)
    assert prompts(source.get_samples(12))[10:] == ["p0", "p1"] and source.epoch_id == 2


def test_samples_don_t_share_state(args: Namespace) -> None:
    (group,) = RolloutDataSource(args).get_samples(1)
    group[0].metadata["x"] = 1
    group[0].tokens.append(1)
    assert group[1].metadata == {} and group[1].tokens == []


@pytest.mark.parametrize("taken", [3, 5, 7])
def test_resume_goes_on_exactly(args: Namespace, taken: int) -> None:
    """Cursor, epoch and shuffle order after a fresh process equal the uninterrupted ones."""
    args.rollout_shuffle = True
    whole = RolloutDataSource(args)
    whole.get_samples(taken)
    whole.save(4)
    expected = whole.get_samples(9)
    resumed = RolloutDataSource(args)
    resumed.load(4)
    got = resumed.get_samples(9)
    assert prompts(got) == prompts(expected)
    assert [s.index for g in got for s in g] == [s.index for g in expected for s in g]


def test_the_buffer_is_saved_with_partial_samples(args: Namespace) -> None:
    source = RolloutDataSourceWithBuffer(args)
    group = source.get_samples(1)[0]
    group[0].tokens = [112, 48]
    group[0].append_response_tokens(
        tokens=[7], log_probs=[-0.5], text="x", meta_info={"finish_reason": {"type": "abort"}}
    )
    group[0].metadata["start_rollout_id"] = 3
    source.add_samples([group])
    source.save(0)
    resumed = RolloutDataSourceWithBuffer(args)
    resumed.load(0)
    assert resumed.get_buffer_length() == 1
    got = resumed.get_samples(2)
    assert got[0] == group and got[0][0].status is Sample.Status.ABORTED and got[1][0].prompt == "p1"


def test_a_half_written_state_is_never_seen(args: Namespace) -> None:
    source = RolloutDataSource(args)
    source.save(0)
    assert [path.name for path in (Path(args.save) / "rollout").iterdir()] == ["global_dataset_state_dict_0.pt"]


def test_loading_nothing_starts_at_the_beginning(args: Namespace, caplog: pytest.LogCaptureFixture) -> None:
    source = RolloutDataSource(args)
    source.load(7)
    assert "no data source state" in caplog.text and prompts(source.get_samples(1)) == ["p0"]


def test_a_position_in_other_data_is_refused(args: Namespace, tmp_path: Path) -> None:
    RolloutDataSource(args).save(0)
    args.prompt_data += "@[:3]"
    with pytest.raises(ValueError, match="5 prompts, this one has 3"):
        RolloutDataSource(args).load(0)


def test_too_small_a_buffer_without_data_is_an_error(args: Namespace) -> None:
    """D10: never empty placeholders."""
    args.rollout_global_dataset = False
    source = RolloutDataSourceWithBuffer(args)
    source.add_samples([[Sample(prompt="a"), Sample(prompt="a")]])
    with pytest.raises(ValueError, match="3 groups were asked for, the buffer gave 1 and there is no data set"):
        source.get_samples(3)


def test_the_buffer_takes_whole_groups(args: Namespace) -> None:
    source = RolloutDataSourceWithBuffer(args)
    with pytest.raises(ValueError, match="a group of 1 samples"):
        source.add_samples([[Sample()]])


def test_prompts_are_needed(args: Namespace) -> None:
    args.prompt_data = None
    with pytest.raises(ValueError, match="--prompt-data is not set"):
        RolloutDataSource(args)


def take_last(args: Namespace, rollout_id: int | None, buffer: list[Any], num_samples: int) -> list[Any]:
    return [buffer.pop() for _ in range(min(num_samples, len(buffer)))]


def test_buffer_filter_chooses(args: Namespace) -> None:
    args.buffer_filter_path = f"{__name__}.take_last"
    source = RolloutDataSourceWithBuffer(args)
    source.add_samples([[Sample(prompt=name)] * 2 for name in "abc"])
    assert prompts(source.get_samples(2)) == ["c", "b"] and source.get_buffer_length() == 1
