"""A folder of safetensors files as engines' hosts see it: whether it is whole, and where each tensor's bytes lie.

It needs neither torch nor the safetensors library: engine actors use it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
# what a weight update is: {"version", "id"}; beside the weights of a full one, and of one that was pulled
STATE_FILE = ".slime_weights.json"
_HEADER_LIMIT = 100_000_000  # of the format


class DamagedCheckpoint(RuntimeError):
    """A file is missing, cut off or garbled; the message names it."""


@dataclass(frozen=True)
class WeightsId:
    """Which weights a folder holds. Versions count from anew in each run, ids never come twice."""

    version: int
    id: str


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor's bytes lie in its file."""

    path: Path
    start: int
    size: int


def version_folder(disk_dir: str | Path, version: int) -> Path:
    """The folder of a weight update."""
    return Path(disk_dir) / f"weight_v{version:06d}"


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        DamagedCheckpoint: it is not there, or is no JSON object.
    """
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(f"{path}: {type(error).__name__}: {error}") from error
    if not isinstance(found, dict):
        raise DamagedCheckpoint(f"{path} holds no JSON object")
    return found


def file_names(folder: Path) -> dict[str, str] | None:
    """The file of each tensor by the index; None where there is a single file and no index.

    Raises:
        DamagedCheckpoint: there is neither.
    """
    if (folder / INDEX_FILE).exists():
        names = read_json(folder / INDEX_FILE).get("weight_map")
        if not isinstance(names, dict):
            raise DamagedCheckpoint(f"{folder / INDEX_FILE} has no weight_map")
        return names
    if (folder / SINGLE_FILE).exists():
        return None
    raise DamagedCheckpoint(f"{folder} holds neither {INDEX_FILE} nor {SINGLE_FILE}")


def tensor_places(folder: Path) -> dict[str, TensorPlace]:
    """Where the bytes of every tensor lie; it reads headers only, and compares each file's size with its header.

    Raises:
        DamagedCheckpoint: a file is missing, cut off or garbled, or lacks a tensor that the index says it has.
    """
    file_of = file_names(folder)
    places: dict[str, TensorPlace] = {}
    for name in sorted(set(file_of.values())) if file_of is not None else [SINGLE_FILE]:
        places |= _read_header(folder / name)
    for tensor, name in (file_of or {}).items():
        if tensor not in places or places[tensor].path.name != name:
            raise DamagedCheckpoint(f"{folder / name} lacks the tensor {tensor}, which the index says it has")
    return places


def _read_header(path: Path) -> dict[str, TensorPlace]:
    try:
        size = path.stat().st_size
        with open(path, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 0 < length <= min(size - 8, _HEADER_LIMIT):
                raise DamagedCheckpoint(f"{path} is no safetensors file, or is cut off: {size} bytes")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        offsets = {name: entry["data_offsets"] for name, entry in header.items()}
        places = {name: TensorPlace(path, 8 + length + start, end - start) for name, (start, end) in offsets.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(f"{path}: {type(error).__name__}: {error}") from error
    end = max((place.start + place.size for place in places.values()), default=8 + length)
    if end != size:
        raise DamagedCheckpoint(f"{path} is cut off or damaged: it has {size} bytes, its header says {end}")
    return places
