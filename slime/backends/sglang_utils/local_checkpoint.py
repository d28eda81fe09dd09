"""The checkpoint on an engine's host that weight updates are pulled into (--update-weight-local-checkpoint-dir).

An engine loads it whole with POST /update_weights_from_disk, so an SGLang that knows nothing of deltas takes them. All
engines of a host share it. It is never loaded unless it is whole: what a pull that failed half way left has no
version, and the next update starts from all weights.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from slime.utils import disk_delta
from slime.utils.checkpoint_folder import (
    INDEX_FILE,
    STATE_FILE,
    DamagedCheckpoint,
    TensorPlace,
    WeightsId,
    read_json,
    tensor_places,
)

logger = logging.getLogger(__name__)

_MARKER = ".slime_local_checkpoint"  # only folders with it are replaced
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_THREADS = min(32, os.cpu_count() or 1)


class WrongBase(RuntimeError):
    """A delta does not start from the weights that are here; the message names both."""


class WrongChecksum(RuntimeError):
    """A tensor is not what the trainer had after the delta; the message names it."""


class LocalCheckpoint:
    """The folder and what is done to it; each call holds the host's lock on it.

    Raises:
        ValueError: the folder has files that were not pulled.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        if self._folder.is_dir() and any(self._folder.iterdir()) and not (self._folder / _MARKER).exists():
            raise ValueError(
                f"--update-weight-local-checkpoint-dir {folder} has files that no weight update wrote: "
                "it would be replaced; name a folder that is empty or is to be made"
            )
        self._folder.parent.mkdir(parents=True, exist_ok=True)

    def held(self) -> WeightsId | None:
        """Which weights it holds; None when there are none, when they are not whole, or when the host was started
        anew since (they may not have reached the disk)."""
        try:
            state = read_json(self._folder / STATE_FILE)
        except DamagedCheckpoint:
            return None
        if state.get("boot_id") != _boot_id():
            return None
        return WeightsId(state["version"], state["id"])

    def pull(self, source: Path) -> None:
        """Make it hold the weights of the update in `source`, which is a checkpoint or a delta. Nothing happens when
        another engine of this host has done it.

        Raises:
            DamagedCheckpoint, WrongBase, WrongChecksum: naming the file or the tensor.
            OSError: the disk is full.
        """
        with self._locked():
            if (source / STATE_FILE).exists():
                self._replace(source)
            else:
                self._advance(source)

    def apply(self, source: Path) -> None:
        """Apply the delta in `source`, once.

        Raises:
            as `pull`; WrongBase also when it has been applied already.
        """
        with self._locked():
            self._apply(source, read_json(source / INDEX_FILE).get("metadata", {}))

    def _replace(self, source: Path) -> None:
        wanted = _weights_id(source / STATE_FILE, read_json(source / STATE_FILE))
        if self.held() == wanted:
            return
        tensor_places(source)
        staging = self._folder.parent / f".{self._folder.name}.incomplete"
        shutil.rmtree(staging, ignore_errors=True)
        shutil.rmtree(self._folder, ignore_errors=True)  # there may not be room for both
        staging.mkdir()
        try:
            with ThreadPoolExecutor(_THREADS) as pool:
                entries = [entry for entry in source.iterdir() if entry.is_file() and entry.name != STATE_FILE]
                list(pool.map(lambda entry: shutil.copyfile(entry, staging / entry.name), entries))
            tensor_places(staging)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        (staging / _MARKER).touch()
        staging.rename(self._folder)
        self._note(wanted)

    def _advance(self, source: Path) -> None:
        metadata = read_json(source / INDEX_FILE).get("metadata", {})
        if self.held() != _weights_id(source / INDEX_FILE, metadata):
            self._apply(source, metadata)

    def _apply(self, source: Path, metadata: Mapping[str, Any]) -> None:
        index = source / INDEX_FILE
        wanted = _weights_id(index, metadata)
        base = WeightsId(metadata.get("base_version", -1), str(metadata.get("base_id")))
        held = self.held()
        if held != base:
            raise WrongBase(_wrong_base(source, self._folder, wanted, base, held))
        if metadata.get("compression_format") != disk_delta.COMPRESSION:
            raise DamagedCheckpoint(f"{index}: compression_format {metadata.get('compression_format')!r} is unknown")
        packed, own = tensor_places(source), tensor_places(self._folder)
        if unknown := sorted(packed.keys() - own.keys()):
            raise DamagedCheckpoint(f"{source} changes tensors that {self._folder} lacks: {', '.join(unknown[:8])}")
        digests = _digests(packed.values())
        (self._folder / STATE_FILE).unlink()
        step = _Step(metadata["delta_encoding"], metadata["checksum_format"], digests)
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(lambda name: step.apply(name, packed[name], own[name]), packed))
        self._note(wanted)

    def _note(self, weights: WeightsId) -> None:
        state = {"version": weights.version, "id": weights.id, "boot_id": _boot_id()}
        temporary = self._folder / f"{STATE_FILE}.new"
        temporary.write_text(json.dumps(state) + "\n")
        temporary.replace(self._folder / STATE_FILE)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with open(self._folder.parent / f".{self._folder.name}.lock", "w") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            yield


class _Step:
    """How the tensors of one delta are brought to their new state."""

    def __init__(self, encoding: str, checksum_kind: str, digests: Mapping[str, str]) -> None:
        self._encoding = encoding
        self._checksum_kind = checksum_kind
        self._digests = digests

    def apply(self, name: str, packed: TensorPlace, place: TensorPlace) -> None:
        """Compute a tensor's new bytes, compare their checksum, then write them."""
        with open(packed.path, "rb") as stream:
            stream.seek(packed.start)
            payload = stream.read(packed.size)
        target = np.memmap(place.path, np.uint8, "r+", place.start, (place.size,))
        try:
            new = disk_delta.decode(target, payload, self._encoding)
        except disk_delta.DeltaError as error:
            raise DamagedCheckpoint(f"{packed.path}: the delta of {name} is damaged: {error}") from error
        found, expected = disk_delta.checksum(new, self._checksum_kind), self._digests.get(name)
        if found != expected:
            raise WrongChecksum(
                f"{packed.path}: {name} has the {self._checksum_kind} checksum {found} after the delta, "
                f"the trainer's has {expected}"
            )
        target[:] = new


def _digests(places: Any) -> dict[str, str]:
    """The checksums in the headers of a delta's files."""
    digests: dict[str, str] = {}
    for path in {place.path for place in places}:
        with open(path, "rb") as stream:
            digests |= json.loads(stream.read(int.from_bytes(stream.read(8), "little"))).get("__metadata__", {})
    return digests


def _weights_id(path: Path, found: Mapping[str, Any]) -> WeightsId:
    if not isinstance(found.get("version"), int) or not isinstance(found.get("id"), str):
        raise DamagedCheckpoint(f"{path} does not say which weights these are")
    return WeightsId(found["version"], found["id"])


def _wrong_base(source: Path, folder: Path, wanted: WeightsId, base: WeightsId, held: WeightsId | None) -> str:
    start = f"{source} makes version {wanted.version} of version {base.version} ({base.id}), but {folder} holds "
    if held is None:
        return start + "no whole weights"
    if held == wanted:
        return start + f"version {held.version} already: it was applied before"
    return start + f"version {held.version} ({held.id})"


def _boot_id() -> str:
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
