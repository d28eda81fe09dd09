"""Large files, Hugging Face folders and weighted mixes of several sources."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime.observability.rollout_metrics import _source_metrics
from slime.rollout.data_source import RolloutDataSource
from slime.utils import data as data_module
from slime.utils import row_stores
from slime.utils.data import Dataset
from slime.utils.prompt_data import parse_prompt_data
from slime.utils.read_rows import check_file, read_file, wanted_columns
from slime.utils.types import Sample
from tests.support.rollout_args import rollout_args
from tests.support.toy_tokenizer import byte_tokenizer, word_tokenizer


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def args(tmp_path: Path) -> Namespace:
    byte_tokenizer().save_pretrained(tmp_path / "hf")
    write(tmp_path / "a.jsonl", [{"input": f"a{i}"} for i in range(7)])
    write(tmp_path / "b.jsonl", [{"input": f"b{i}"} for i in range(5)])
    folder = str(tmp_path / "ckpt")
    paths = [f"{tmp_path}/a.jsonl@[1:]:0.7", f"{tmp_path}/b.jsonl:0.3"]
    return rollout_args(hf_checkpoint=str(tmp_path / "hf"), prompt_data=paths, save=folder, load=folder)


def prompts(groups: list[list[Sample]]) -> list[Any]:
    return [group[0].prompt for group in groups]


# -- one file -----------------------------------------------------------------------------------------------------


def test_a_large_file_is_read_as_it_is_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long prompts are passed over, broken rows are errors with their line when they are reached."""
    monkeypatch.setattr(data_module, "WHOLE_ROWS", 3)
    monkeypatch.setattr(data_module, "PROBED_ROWS", 1)
    rows = [{"text": "x"}, {"text": "x x x"}, {"text": "x x"}, {"text": "x"}, {"text": None}]
    path = write(tmp_path / "d.jsonl", rows)
    data = Dataset(path, word_tokenizer("x"), None, 2)
    samples, position = data.take(0, 3)
    assert [sample.prompt for sample in samples] == ["x", "x x", "x"] and position == 4
    assert len(data) == 5 and data.num_too_long == 1
    with pytest.raises(ValueError, match=r"d\.jsonl:5 has no prompt under 'text'"):
        data.take(position, 1)


def test_a_large_file_that_begins_with_long_prompts_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_module, "WHOLE_ROWS", 1)
    monkeypatch.setattr(data_module, "PROBED_ROWS", 2)
    path = write(tmp_path / "d.jsonl", [{"text": "x x x"}] * 3)
    with pytest.raises(ValueError, match="every one of the first 2 prompts is longer than 2 tokens"):
        Dataset(path, word_tokenizer("x"), None, 2)


def test_bytes_that_are_no_utf8_name_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"text": "a"}\n\n' + '{"text": "café"}\n'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.jsonl:3: byte 0xe9 at position 13 is not UTF-8"):
        list(read_file(str(path)))


def test_a_byte_order_mark_is_no_part_of_the_data(tmp_path: Path) -> None:
    path = tmp_path / "bom.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\n')
    assert list(read_file(str(path))) == [{"text": "a"}]


def test_letters_in_a_slice_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [{"text": "a"}])
    with pytest.raises(ValueError, match=r"\[first:last\] is no slice of rows; write \[a:b\]"):
        list(read_file(f"{path}@[first:last]"))


def test_a_null_prompt_is_found_before_anything_starts(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [{"text": "a"}, {"text": None}])
    with pytest.raises(ValueError, match=r"d\.jsonl:2 has no prompt under 'text'"):
        check_file(path, wanted_columns("text", None, None), 2**20)


def test_row_groups_are_kept_within_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    monkeypatch.setattr(row_stores, "DECODED_BYTES", 1)
    rows = [{"text": f"p{i}", "unused": i} for i in range(7)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet", row_group_size=2)
    data = Dataset(f"{tmp_path}/d.parquet@[1:]", None, None, None)
    data.shuffle(3)
    assert sorted(sample.prompt for sample in data.samples) == [f"p{i}" for i in range(1, 7)]
    assert len(data._rows.store._decoded) == 1  # type: ignore[attr-defined]
    assert [sample.prompt for sample in data.origin_samples][:2] == ["p1", "p2"]


def test_hugging_face_folders(tmp_path: Path) -> None:
    """What `save_to_disk` writes: Arrow streams and a state.json."""
    import pyarrow as pa

    folder = tmp_path / "set" / "train"
    folder.mkdir(parents=True)
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    for first, name in enumerate(names):
        table = pa.Table.from_pylist([{"text": f"p{2 * first + i}", "metadata": {"i": i}} for i in range(2)])
        with pa.ipc.new_stream(folder / name, table.schema) as stream:
            stream.write_table(table)
    data = Dataset(f"{folder}@[1:]", None, None, None)
    assert [(s.prompt, s.metadata["i"]) for s in data.samples] == [("p1", 1), ("p2", 0), ("p3", 1)]
    with pytest.raises(ValueError, match=r"no row has the label key 'x'; .*metadata"):
        check_file(str(folder), wanted_columns("text", "x", None), 0)
    (tmp_path / "set" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ValueError, match=r"has the splits \['train', 'test'\]; give one of them, such as .*set/train"):
        Dataset(str(tmp_path / "set"), None, None, None)


# -- several ------------------------------------------------------------------------------------------------------


def test_a_mix_has_its_ratio_in_every_batch(args: Namespace) -> None:
    source = RolloutDataSource(args)
    for _ in range(4):
        names = [group[0].metadata["source_name"] for group in source.get_samples(10)]
        assert names.count("a") == 7
    first = prompts(RolloutDataSource(args).get_samples(40))
    assert first == prompts(RolloutDataSource(args).get_samples(40))
    assert [p for p in first if p[0] == "a"][:8] == ["a1", "a2", "a3", "a4", "a5", "a6", "a1", "a2"]


@pytest.mark.parametrize("taken", [3, 11, 29])
def test_every_cursor_resumes_exactly(args: Namespace, taken: int) -> None:
    args.rollout_shuffle = True
    whole = RolloutDataSource(args)
    whole.get_samples(taken)
    whole.save(4)
    resumed = RolloutDataSource(args)
    resumed.load(4)
    assert prompts(resumed.get_samples(23)) == prompts(whole.get_samples(23))


def test_without_weights_the_files_run_out_together(args: Namespace) -> None:
    args.prompt_data = [path.rpartition(":")[0] for path in args.prompt_data]
    assert len(set(prompts(RolloutDataSource(args).get_samples(11)))) == 11


def test_new_weights_hold_from_the_resume_on(args: Namespace) -> None:
    source = RolloutDataSource(args)
    source.get_samples(100)
    source.save(0)
    args.prompt_data = [args.prompt_data[0].replace("0.7", "0.5"), args.prompt_data[1].replace("0.3", "0.5")]
    resumed = RolloutDataSource(args)
    resumed.load(0)
    assert [p[0] for p in prompts(resumed.get_samples(10))].count("a") == 5


def test_other_sources_are_refused(args: Namespace) -> None:
    RolloutDataSource(args).save(0)
    other = args.prompt_data[1].replace("b.jsonl", "c.jsonl")
    write(Path(other.rpartition(":")[0]), [{"input": f"c{i}"} for i in range(5)])
    args.prompt_data = [args.prompt_data[0], other]
    with pytest.raises(ValueError, match=r"in the data sets \['a', 'b'\], these are \['a', 'c'\]"):
        RolloutDataSource(args).load(0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a.jsonl:0.7", "b.jsonl"], r"either every file has a weight or none; b\.jsonl has none"),
        (["a.jsonl:1", "x/a.jsonl:1"], "several files are called 'a'"),
        (["a.jsonl:1", "b.jsonl:0"], "above 0"),
    ],
)
def test_mixes_that_make_no_sense(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_prompt_data(words)


def test_metrics_per_source() -> None:
    samples = [Sample(reward=float(i), metadata={"source_name": "ab"[i % 2]}) for i in range(4)]
    metrics = _source_metrics(rollout_args(), samples)
    assert metrics == {"a/raw_reward": 1.0, "b/raw_reward": 2.0, "a/share": 0.5, "b/share": 0.5}
    assert _source_metrics(rollout_args(), [Sample(reward=1.0)]) == {}
