"""The CPU's memory saver: swaps the trainer's storages out to a file that has no name, so that memory really falls."""

from __future__ import annotations

import ctypes
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import torch

from slime.utils.accelerator.memory_saver import MemorySaver
from slime.utils.accelerator.trainer_tensors import trainer_storages
from slime.utils.memory_utils import trim_heap

logger = logging.getLogger(__name__)

_PIECE = 1 << 30  # one system call moves at most 2 GiB


class FileMemorySaver(MemorySaver):
    """Writes every storage to a temporary file, empties it in place, and reads it back.

    Tensors keep their storages, so views go on sharing memory. The file lies in `directory`, by default the first of
    the system's temporary directories that is not itself in memory; it disappears when the process ends, however.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        self._directory = Path(directory) if directory is not None else _directory_on_disk()
        self._swapped: list[tuple[torch.UntypedStorage, int]] = []
        self._file: IO[bytes] | None = None

    @property
    def paused(self) -> bool:
        return self._file is not None

    def pause(self, model_chunks: Sequence[Any], optimizer: Any = None) -> int:
        """Swap out. Storages that can't be resized (shared or mapped memory) stay, which is logged.

        Raises:
            RuntimeError: paused already.
            OSError: the file can't be written; then nothing has been freed.
        """
        if self.paused:
            raise RuntimeError("the trainer's memory is paused already")
        storages = trainer_storages(model_chunks, optimizer)
        movable = [storage for storage in storages if storage.resizable()]
        self._file = self._written(movable)
        self._swapped = [(storage, storage.nbytes()) for storage in movable]
        for storage in movable:
            storage.resize_(0)
        trim_heap()
        kept = sum(storage.nbytes() for storage in storages)
        if kept:
            logger.warning("%d bytes of shared or mapped trainer memory can't be swapped out", kept)
        return sum(size for _, size in self._swapped)

    def resume(self) -> int:
        if self._file is None:
            raise RuntimeError("the trainer's memory is not paused")
        offset = 0
        for storage, size in self._swapped:
            storage.resize_(size)
            _transfer(os.preadv, self._file.fileno(), storage, offset)
            offset += size
        self._file.close()
        self._file, self._swapped = None, []
        return offset

    def _written(self, storages: list[torch.UntypedStorage]) -> IO[bytes]:
        file = tempfile.TemporaryFile(dir=self._directory, prefix="slime-trainer-")  # noqa: SIM115 - open until resume
        total = sum(storage.nbytes() for storage in storages)
        try:
            if total:
                os.posix_fallocate(file.fileno(), 0, total)  # a full disk shows here, before anything is freed
            offset = 0
            for storage in storages:
                _transfer(os.pwritev, file.fileno(), storage, offset)
                offset += storage.nbytes()
        except OSError as error:
            file.close()
            message = f"swapping {total} bytes of trainer memory out to {self._directory} failed: {error.strerror}"
            raise OSError(error.errno, message) from error
        return file


def _transfer(call: Any, fd: int, storage: torch.UntypedStorage, offset: int) -> None:
    """Move a whole storage by `os.preadv` or `os.pwritev`, which may do it in parts."""
    memory = memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr()))
    done = 0
    while done < len(memory):
        moved = call(fd, [memory[done : done + _PIECE]], offset + done)
        if moved <= 0:
            raise OSError(f"the swap file ends {len(memory) - done} bytes early")
        done += moved


def _directory_on_disk() -> Path:
    candidates = [Path(tempfile.gettempdir()), Path("/var/tmp")]
    for directory in candidates:
        if directory.is_dir() and not _in_memory(directory):
            return directory
    logger.warning("%s lies in memory: offloading the trainer frees none", candidates[0])
    return candidates[0]


def _in_memory(directory: Path) -> bool:
    """Whether the file system that holds `directory` is a tmpfs or ramfs."""
    import psutil

    holding = [p for p in psutil.disk_partitions(all=True) if directory.resolve().is_relative_to(p.mountpoint)]
    if not holding:
        return False
    return max(holding, key=lambda p: len(p.mountpoint)).fstype in ("tmpfs", "ramfs")
