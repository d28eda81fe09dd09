"""The checkpoint on an engine's host: whole states and deltas pulled into it, and everything that it refuses."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from slime.backends.sglang_utils import local_checkpoint
from slime.backends.sglang_utils.local_checkpoint import LocalCheckpoint, WrongBase, WrongChecksum
from slime.utils.checkpoint_folder import INDEX_FILE, STATE_FILE, DamagedCheckpoint, WeightsId, version_folder
from slime.utils.disk_delta import checksum, encode

State = dict[str, np.ndarray]
FILES = {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}
CHECKSUM = "xxh3-128"


def state_of(version: int) -> State:
    rng = np.random.default_rng(version)
    return {"a": rng.random(500), "b": rng.random((3, 40)).astype(np.float16), "c": np.arange(7)}


def write_full(shared: Path, version: int, state: State) -> Path:
    folder = version_folder(shared, version)
    folder.mkdir(parents=True)
    for file in set(FILES.values()):
        save_file({name: state[name] for name in state if FILES[name] == file}, folder / file)
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": FILES}))
    (folder / STATE_FILE).write_text(json.dumps({"version": version, "id": f"id{version}"}))
    (folder / "config.json").write_text("{}")
    return folder


def write_delta(shared: Path, version: int, old: State, new: State, encoding: str = "xor") -> Path:
    folder = version_folder(shared, version)
    folder.mkdir(parents=True)
    payloads, digests = {}, {}
    for name in old:
        before, after = (np.frombuffer(state[name].tobytes(), np.uint8) for state in (old, new))
        payload, changed = encode(before, after, encoding)
        if changed:
            payloads[name], digests[name] = np.frombuffer(payload, np.uint8), checksum(after, CHECKSUM)
    save_file(payloads, folder / "model.safetensors", digests)
    metadata = {
        "version": version, "id": f"id{version}", "base_version": version - 1, "base_id": f"id{version - 1}",
        "delta_encoding": encoding, "compression_format": "zstd", "checksum_format": CHECKSUM,
    }  # fmt: skip
    index = {"metadata": metadata, "weight_map": dict.fromkeys(payloads, "model.safetensors")}
    (folder / INDEX_FILE).write_text(json.dumps(index))
    return folder


def read(folder: Path) -> State:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_holds(local: Path, state: State) -> None:
    found = read(local)
    assert found.keys() == state.keys()
    for name in state:
        assert found[name].tobytes() == state[name].tobytes() and found[name].dtype == state[name].dtype, name


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    return tmp_path / "shared"


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return tmp_path / "host" / "local"


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_a_full_state_and_deltas_on_it(shared: Path, local: Path, encoding: str) -> None:
    """Two engines of a host pull each, and the second finds it done; an update that changes nothing counts too."""
    states = [state_of(1), state_of(2), state_of(2), state_of(3)]
    engines = [LocalCheckpoint(local), LocalCheckpoint(local)]
    assert engines[0].held() is None
    source = write_full(shared, 1, states[0])
    for version, (old, new) in enumerate(zip([states[0], *states], states, strict=False), start=1):
        source = write_delta(shared, version, old, new, encoding) if version > 1 else source
        for engine in engines:
            engine.pull(source)
            assert engine.held() == WeightsId(version, f"id{version}")
            assert_holds(local, new)
    assert (local / "config.json").exists()
    engines[0].pull(write_full(shared, 7, states[0]))
    assert_holds(local, states[0])


def test_a_delta_is_applied_once_and_on_its_base_only(shared: Path, local: Path, monkeypatch) -> None:
    checkpoint = LocalCheckpoint(local)
    first, second, third = state_of(1), state_of(2), state_of(3)
    delta = write_delta(shared, 2, first, second)
    with pytest.raises(WrongBase, match=r"makes version 2 of version 1 .* holds no whole weights"):
        checkpoint.pull(delta)
    checkpoint.pull(write_full(shared, 1, first))
    with pytest.raises(WrongBase, match=r"makes version 3 of version 2 \(id2\), but .* holds version 1 \(id1\)"):
        checkpoint.pull(write_delta(shared, 3, second, third))
    checkpoint.apply(delta)
    with pytest.raises(WrongBase, match="holds version 2 already: it was applied before"):
        checkpoint.apply(delta)
    assert_holds(local, second)
    monkeypatch.setattr(local_checkpoint, "_boot_id", lambda: "another start of the host")
    assert checkpoint.held() is None


def damage_checksum(delta: Path) -> None:
    payloads = load_file(delta / "model.safetensors")
    save_file(payloads, delta / "model.safetensors", dict.fromkeys(payloads, "0" * 32))


def damage_payload(delta: Path) -> None:
    raw = bytearray((delta / "model.safetensors").read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")
    raw[start:] = bytes(len(raw) - start)
    (delta / "model.safetensors").write_bytes(raw)


def cut_off(delta: Path) -> None:
    raw = (delta / "model.safetensors").read_bytes()
    (delta / "model.safetensors").write_bytes(raw[:-5])


def remove_file(delta: Path) -> None:
    (delta / "model.safetensors").unlink()


def garble_index(delta: Path) -> None:
    (delta / INDEX_FILE).write_text("{")


@pytest.mark.parametrize(
    ("damage", "error", "text", "whole"),
    [
        (damage_checksum, WrongChecksum, "has the xxh3-128 checksum .* the trainer's has 000", False),
        (damage_payload, DamagedCheckpoint, "the delta of . is damaged", False),
        (cut_off, DamagedCheckpoint, "model.safetensors is cut off", True),
        (remove_file, DamagedCheckpoint, "model.safetensors.*No such file", True),
        (garble_index, DamagedCheckpoint, f"{INDEX_FILE}: JSONDecodeError", True),
    ],
)
def test_a_damaged_delta_is_named(
    shared: Path, local: Path, damage: Callable[[Path], None], error: type[Exception], text: str, whole: bool
) -> None:
    """What it may have changed has no version any more; a full state repairs it."""
    checkpoint = LocalCheckpoint(local)
    first, second = state_of(1), state_of(2)
    checkpoint.pull(write_full(shared, 1, first))
    delta = write_delta(shared, 2, first, second)
    damage(delta)
    with pytest.raises(error, match=text):
        checkpoint.pull(delta)
    assert checkpoint.held() == (WeightsId(1, "id1") if whole else None)
    checkpoint.pull(write_full(shared, 3, second))
    assert_holds(local, second)


def test_a_damaged_or_unwritable_full_state(shared: Path, local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = LocalCheckpoint(local)
    checkpoint.pull(write_full(shared, 1, state_of(1)))
    source = write_full(shared, 2, state_of(2))
    (source / "one.safetensors").write_bytes((source / "one.safetensors").read_bytes()[:100])
    with pytest.raises(DamagedCheckpoint, match=r"one\.safetensors is"):
        checkpoint.pull(source)
    assert checkpoint.held() == WeightsId(1, "id1")

    def full(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(target))

    source = write_full(shared, 3, state_of(3))
    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(OSError, match=r"No space left on device: .*incomplete"):
        checkpoint.pull(source)
    monkeypatch.undo()
    assert checkpoint.held() is None and not list(local.parent.glob("*incomplete*"))
    checkpoint.pull(source)
    assert_holds(local, state_of(3))


def test_a_folder_of_somebody_else_is_not_replaced(local: Path) -> None:
    local.mkdir(parents=True)
    (local / "thesis.tex").touch()
    with pytest.raises(ValueError, match="has files that no weight update wrote"):
        LocalCheckpoint(local)
