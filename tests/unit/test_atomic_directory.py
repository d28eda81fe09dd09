"""Directories appear whole: what an interrupted write left behind is never taken for a result."""

from __future__ import annotations

from pathlib import Path

from slime.backends.megatron_utils import atomic_directory


def test_a_directory_appears_when_published(tmp_path: Path) -> None:
    target = tmp_path / "iter_0000001"
    (atomic_directory.start_staging(target) / "data").write_text("new")
    assert not target.exists()
    atomic_directory.publish_directory(target)
    assert (target / "data").read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["iter_0000001"]


def test_leftovers_of_an_interrupted_write_are_dropped(tmp_path: Path) -> None:
    target = tmp_path / "iter_0000001"
    (atomic_directory.start_staging(target) / "half").write_text("")
    (atomic_directory.start_staging(target) / "data").write_text("")
    atomic_directory.publish_directory(target)
    assert [entry.name for entry in target.iterdir()] == ["data"]


def test_a_directory_of_that_name_is_replaced(tmp_path: Path) -> None:
    target = tmp_path / "export"
    for content in ("first", "second"):
        (atomic_directory.start_staging(target) / content).write_text("")
        atomic_directory.publish_directory(target)
    assert [entry.name for entry in target.iterdir()] == ["second"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["export"]


def test_text_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "latest_checkpointed_iteration.txt"
    for iteration in ("3", "12"):
        atomic_directory.write_text(path, iteration)
        assert path.read_text() == iteration
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
