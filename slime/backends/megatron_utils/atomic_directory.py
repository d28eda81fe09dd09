"""Directories and files that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

_INCOMPLETE, _REPLACED, _DELETED = ".incomplete", ".replaced", ".deleted"
LEFTOVER_SUFFIXES = (_INCOMPLETE, _DELETED)


def staging_path(target: Path) -> Path:
    """Where a directory is written before it takes its name: hidden, beside it, so that the rename stays on a disk."""
    return _hidden(target, _INCOMPLETE)


def start_staging(target: Path) -> Path:
    """An empty staging directory for `target`; what an interrupted earlier write left there is removed."""
    staging = staging_path(target)
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    return staging


def publish_directory(target: Path) -> None:
    """Give the staged directory its name, in place of an older one if there is one.

    Its files are on disk before the name is. An interruption between the two renames of a replacement leaves the older
    directory under a hidden name; `restore_replaced` gives it back.
    """
    staging, old = staging_path(target), _hidden(target, _REPLACED)
    sync_files(staging)
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.rename(target, old)
    os.rename(staging, target)
    sync_directory(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def restore_replaced(parent: Path) -> None:
    """Give directories in `parent` their names back whose replacement was interrupted half way."""
    for old in parent.glob(f".*{_REPLACED}"):
        target = parent / old.name.removeprefix(".").removesuffix(_REPLACED)
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.rename(old, target)


def delete_directory(target: Path) -> None:
    """Remove a directory; its name is gone before the first of its files is."""
    doomed = _hidden(target, _DELETED)
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(target, doomed)
    shutil.rmtree(doomed)


def write_text(path: Path, text: str) -> None:
    """Replace a small text file atomically."""
    temporary = _hidden(path, _INCOMPLETE)
    with open(temporary, "w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)
    sync_directory(path.parent)


def sync_files(directory: Path) -> None:
    """Make all files below a directory, and their names, durable."""
    for folder, _, names in os.walk(directory):
        for name in names:
            _sync(Path(folder, name))
        _sync(Path(folder))


def sync_directory(path: Path) -> None:
    """Make renames and new names in a directory durable."""
    _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _hidden(target: Path, suffix: str) -> Path:
    return target.parent / f".{target.name}{suffix}"
