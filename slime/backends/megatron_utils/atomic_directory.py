"""Directories and files that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def staging_path(target: Path) -> Path:
    """Where a directory is written before it takes its name: hidden, beside it, so that the rename stays on a disk."""
    return target.parent / f".{target.name}.incomplete"


def start_staging(target: Path) -> Path:
    """An empty staging directory for `target`; what an interrupted earlier write left there is removed."""
    staging = staging_path(target)
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    return staging


def publish_directory(target: Path) -> None:
    """Give the staged directory its name, in place of an older one if there is one."""
    staging, old = staging_path(target), target.parent / f".{target.name}.replaced"
    shutil.rmtree(old, ignore_errors=True)
    sync_directory(staging)
    if target.exists():
        os.rename(target, old)
    os.rename(staging, target)
    sync_directory(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Replace a small text file atomically."""
    temporary = path.with_name(f".{path.name}.incomplete")
    with open(temporary, "w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make renames and new names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
