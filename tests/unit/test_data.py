"""Prompt files and data sets."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from slime.utils.data import Dataset, filter_long_prompt, read_file
from slime.utils.read_rows import split_slice
from slime.utils.types import Sample
from tests.support.toy_tokenizer import byte_tokenizer, word_tokenizer

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if tools %}T{{ tools|length }}{% endif %}!"
)


def write_jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    return str(path)


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    return str(path)


@pytest.fixture(params=["jsonl", "parquet"])
def five_rows(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    write = write_jsonl if request.param == "jsonl" else write_parquet
    return write(tmp_path / f"five.{request.param}", [{"i": i} for i in range(5)])


@pytest.mark.parametrize(
    ("cut", "expected"),
    [
        ("[-2:]", [3, 4]),
        ("[1:-1]", [1, 2, 3]),
        ("[:2]", [0, 1]),
        ("[:]", [0, 1, 2, 3, 4]),
        ("[3:99]", [3, 4]),
        ("[:-9]", []),
    ],
)
def test_slices(five_rows: str, cut: str, expected: list[int]) -> None:
    """D5: slices may be negative."""
    assert [row["i"] for row in read_file(f"{five_rows}@{cut}")] == expected


def test_an_at_sign_without_slice_is_a_path(tmp_path: Path) -> None:
    """D5"""
    path = write_jsonl(tmp_path / "a@b.jsonl", [{"i": 0}, {"i": 1}])
    assert len(list(read_file(path))) == 2
    assert [row["i"] for row in read_file(f"{path}@[1:]")] == [1]
    assert split_slice("a@[x].jsonl")[1] == slice(None)


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text('{"i": 0}\n\n{"i": 1\n{"i": 2}\n')
    with pytest.raises(ValueError, match=r"broken\.jsonl:3: broken JSON"):
        list(read_file(str(path)))
    assert [row["i"] for row in read_file(f"{path}@[:1]")] == [0]


def test_a_row_that_is_no_object_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: .*list"):
        list(read_file(write_jsonl(tmp_path / "rows.jsonl", [{}, [1]])))


def test_missing_file_and_unknown_suffix(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl"):
        list(read_file(str(tmp_path / "none.jsonl@[:1]")))
    (tmp_path / "data.csv").write_text("a")
    with pytest.raises(ValueError, match=r"\.jsonl or \.parquet"):
        list(read_file(str(tmp_path / "data.csv")))


@pytest.mark.parametrize("label", ["007", "1e3", 7, 0, 1.5, None])
def test_labels_stay_as_written(tmp_path: Path, label: Any) -> None:
    """D6"""
    path = write_jsonl(tmp_path / "d.jsonl", [{"text": "a", "label": label}])
    value = Dataset(path, None, None, None, label_key="label")[0].label
    assert value == label and type(value) is type(label)


def test_the_limit_counts_tokens() -> None:
    """D1: nine characters are two tokens."""
    samples = [Sample(prompt="aaaa aaaa"), Sample(prompt="aaaa aaaa aaaa aaaa aaaa")]
    assert filter_long_prompt(samples, word_tokenizer("aaaa"), None, 4) == samples[:1]


def test_no_limit_keeps_the_samples() -> None:
    """D2"""
    samples = [Sample(prompt="a"), Sample(prompt=[{"role": "user", "content": "b"}])]
    assert filter_long_prompt(samples, None, None, None) == samples


def test_message_lists_are_kept_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """D3"""
    samples = [Sample(prompt=[{"role": "user", "content": "long " * 50}]) for _ in range(3)]
    with caplog.at_level(logging.WARNING):
        assert filter_long_prompt(samples, word_tokenizer("long"), None, 10) == samples
    assert len(caplog.records) == 1 and "3 prompts are message lists" in caplog.text


class CountingProcessor:
    """Counts a token per character, and ten per image."""

    def __call__(self, text: list[str], images: list[Any]) -> dict[str, Any]:
        return {"input_ids": [[0] * (len(text[0]) + 10 * len(images))]}


def test_text_and_image_rows_keep_their_order() -> None:
    """D4: the filter measures both kinds and puts none first."""
    image = {"images": [object()]}
    samples = [Sample(prompt="a"), Sample(prompt="b", multimodal_inputs=image), Sample(prompt="c")]
    tokenizer = word_tokenizer("a", "b", "c")
    assert filter_long_prompt(samples, tokenizer, CountingProcessor(), 11) == samples
    assert filter_long_prompt(samples, tokenizer, CountingProcessor(), 5) == [samples[0], samples[2]]


def test_every_prompt_too_long_is_an_error(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [{"text": "aaaa aaaa"}])
    with pytest.raises(ValueError, match="every prompt is longer than 1 tokens"):
        Dataset(path, word_tokenizer("aaaa"), None, 1)


def test_a_plain_prompt_stays_a_string(tmp_path: Path) -> None:
    """D7: no template, no wrapping."""
    path = write_jsonl(tmp_path / "d.jsonl", [{"text": "2+2="}])
    assert Dataset(path, byte_tokenizer(TEMPLATE), None, None)[0].prompt == "2+2="
    templated = Dataset(path, byte_tokenizer(TEMPLATE), None, None, apply_chat_template=True)
    assert templated[0].prompt == "[user]2+2=!"


def test_rows_with_and_without_tools(tmp_path: Path) -> None:
    """D8"""
    tool = {"type": "function", "function": {"name": "f", "description": "d"}}
    rows = [{"text": "a", "tools": [tool]}, {"text": "b", "tools": None}, {"text": "c", "tools": [tool, tool]}]
    path = write_parquet(tmp_path / "tools.parquet", rows)
    data = Dataset(path, byte_tokenizer(TEMPLATE), None, None, tool_key="tools", apply_chat_template=True)
    assert [sample.prompt for sample in data.samples] == ["[user]aT1!", "[user]b!", "[user]cT2!"]
    assert data[0].metadata["tools"][0]["function"]["name"] == "f" and "tools" not in data[1].metadata


def test_tools_as_json_string(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [{"text": "a", "tools": '[{"name": "f"}]'}])
    assert Dataset(path, None, None, None, tool_key="tools")[0].metadata == {"tools": [{"name": "f"}]}


def test_some_rows_have_images(tmp_path: Path) -> None:
    """D9"""
    from PIL import Image

    Image.new("RGB", (2, 2)).save(tmp_path / "x.png")
    rows = [{"text": "plain"}, {"text": "see <image> here", "image": [str(tmp_path / "x.png")]}]
    path = write_jsonl(tmp_path / "d.jsonl", rows)
    data = Dataset(path, None, CountingProcessor(), None, multimodal_keys={"image": "image"})
    assert data[0].prompt == "plain" and data[0].multimodal_inputs is None
    assert [part["type"] for part in data[1].prompt[0]["content"]] == ["text", "image", "text"]
    assert data[1].multimodal_inputs["images"][0].size == (2, 2)


@pytest.mark.parametrize("images", [[], ["a", "b"]])
def test_placeholders_must_match_images(tmp_path: Path, images: list[str]) -> None:
    """D9"""
    path = write_jsonl(tmp_path / "d.jsonl", [{"text": "<image>", "image": images}])
    with pytest.raises(ValueError, match=r"d\.jsonl:1: .*image"):
        Dataset(path, None, CountingProcessor(), None, multimodal_keys={"image": "image"})


@pytest.mark.parametrize(("option", "key"), [("prompt_key", "txt"), ("label_key", "lable"), ("tool_key", "tool")])
def test_a_key_that_no_row_has(tmp_path: Path, option: str, key: str) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [{"text": "a", "label": "b"}])
    with pytest.raises(ValueError, match=rf"key '{key}'; the keys there are \['label', 'text'\]"):
        Dataset(path, None, None, None, **{option: key})


def test_one_row_without_prompt_is_named(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [{"text": "a"}, {"other": "b"}])
    with pytest.raises(ValueError, match=r"d\.jsonl:2 has no prompt under 'text'"):
        Dataset(path, None, None, None)


def test_no_rows(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="no rows"):
        Dataset(str(tmp_path / "d.jsonl"), None, None, None)


def test_shuffle_depends_on_seed_and_epoch_alone(tmp_path: Path) -> None:
    import random

    path = write_jsonl(tmp_path / "d.jsonl", [{"text": str(i)} for i in range(20)])

    def order(seed: int, epochs: list[int]) -> list[str]:
        data = Dataset(path, None, None, None, seed=seed)
        for epoch in epochs:
            data.shuffle(epoch)
        return [sample.prompt for sample in data.samples]

    random.seed(5)
    before = random.getstate()
    assert order(1, [0, 1]) == order(1, [1])
    assert order(1, [0]) != order(1, [1]) != order(2, [1])
    assert sorted(order(1, [3]), key=int) == [str(i) for i in range(20)]
    assert random.getstate() == before
