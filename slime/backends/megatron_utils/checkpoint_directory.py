"""Where checkpoints lie: names, which iteration is the newest, and which old ones may go."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from slime.backends.megatron_utils import atomic_directory
from slime.rollout.data_source import state_path

logger = logging.getLogger(__name__)

TRACKER_FILE = "latest_checkpointed_iteration.txt"
RELEASE = "release"
_PREFIX = "iter_"


def iteration_directory(root: str | Path, iteration: int | str) -> Path:
    """`root/iter_0000012`, or `root/release`."""
    return Path(root) / (RELEASE if iteration == RELEASE else f"{_PREFIX}{int(iteration):07d}")


def is_iteration(path: Path) -> bool:
    """Whether `path` is one complete checkpoint."""
    return (path / "metadata.json").is_file() and (path / "common.pt").is_file()


def is_megatron_checkpoint(path: str | Path | None) -> bool:
    """Whether `path` is a checkpoint directory (it has a tracker file) or one iteration of one."""
    return path is not None and ((Path(path) / TRACKER_FILE).is_file() or is_iteration(Path(path)))


def read_tracker(root: Path) -> int | str | None:
    """The iteration that the tracker file names, or `release`; None without the file.

    Raises:
        ValueError: it holds neither.
    """
    file = root / TRACKER_FILE
    if not file.is_file():
        return None
    content = file.read_text().strip()
    if content == RELEASE:
        return RELEASE
    if not content.isdigit():
        raise ValueError(f"{file} holds {content!r}; expected an iteration number or {RELEASE!r}")
    return int(content)


def write_tracker(root: str | Path, iteration: int | str) -> None:
    """Name the newest iteration, atomically."""
    atomic_directory.write_text(Path(root) / TRACKER_FILE, str(iteration))


def resolve_iteration(path: Path, ckpt_step: int | None) -> Path:
    """The directory of one iteration: `ckpt_step`, else the one that the tracker file names.

    Raises:
        FileNotFoundError: there is no such iteration; the message lists those there are.
        ValueError: the tracker file holds neither a number nor `release`.
    """
    if is_iteration(path):
        return path
    named = ckpt_step if ckpt_step is not None else read_tracker(path)
    if named is None:
        raise FileNotFoundError(f"{path} has no {TRACKER_FILE}")
    directory = iteration_directory(path, named)
    if not is_iteration(directory):
        available = sorted(entry.parent.name for entry in path.glob("*/metadata.json"))
        raise FileNotFoundError(f"{directory} is no complete checkpoint; {path} has {', '.join(available) or 'none'}")
    return directory


def complete_iterations(root: Path) -> list[int]:
    """Iterations with a complete checkpoint, oldest first."""
    return sorted(
        int(entry.name.removeprefix(_PREFIX))
        for entry in root.glob(f"{_PREFIX}*")
        if entry.name.removeprefix(_PREFIX).isdigit() and is_iteration(entry)
    )


def delete_old_checkpoints(root: Path, keep: int) -> list[int]:
    """Delete all but the newest `keep` complete checkpoints and the data states that belong to them; those deleted.

    The one that the tracker file names stays whatever its number, and so do iterations after it: they belong to a run
    that went on from an older one. A directory loses its name before its files go, so a deletion that is interrupted
    leaves no half of a checkpoint under a checkpoint's name.
    """
    latest = read_tracker(root)
    if not isinstance(latest, int):
        return []
    older = [iteration for iteration in complete_iterations(root) if iteration < latest]
    doomed = older[: max(len(older) - (keep - 1), 0)]
    for iteration in doomed:
        atomic_directory.delete_directory(iteration_directory(root, iteration))
        state_path(root, iteration).unlink(missing_ok=True)
    if doomed:
        logger.info("deleted the checkpoints %s of %s", ", ".join(map(str, doomed)), root)
    return doomed


def delete_leftovers(root: Path) -> None:
    """Remove what interrupted saves and deletions left in `root`."""
    for suffix in atomic_directory.LEFTOVER_SUFFIXES:
        for entry in root.glob(f".{_PREFIX}*{suffix}"):
            shutil.rmtree(entry, ignore_errors=True)
