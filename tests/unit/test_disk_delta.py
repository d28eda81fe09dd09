"""Deltas of bytes: what is encoded comes back, bit for bit, and what is damaged is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.backends.megatron_utils.safetensors_file import memory_of
from slime.utils import disk_delta
from slime.utils.disk_delta import CHECKSUMS, DeltaError, checksum, decode, encode, pack_section, unpack_sections

ENCODINGS = ("xor", "overwrite")
both_encodings = pytest.mark.parametrize("encoding", ENCODINGS)


@st.composite
def states(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    old = np.frombuffer(draw(st.binary(max_size=700)), np.uint8)
    new = old.copy()
    if old.size:
        for position, value in draw(st.dictionaries(st.integers(0, old.size - 1), st.integers(0, 255))).items():
            new[position] = value
    return old, new


@both_encodings
@given(pair=states(), block=st.sampled_from([1, 7, 256, 1 << 24]))
@settings(max_examples=60, deadline=None)
def test_what_is_encoded_comes_back(encoding: str, pair: tuple[np.ndarray, np.ndarray], block: int) -> None:
    old, new = pair
    before = old.copy()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_delta, "BLOCK", block)
        payload, changed = encode(old, new, encoding)
    assert changed == int((old != new).sum())
    assert (payload == b"") == (changed == 0)
    assert np.array_equal(decode(old, payload, encoding), new)
    assert np.array_equal(old, before)


@both_encodings
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_every_dtype_and_all_of_its_bits(encoding: str, dtype: torch.dtype) -> None:
    """The payload of a NaN and the sign of a zero too, which comparing values would lose."""
    old = torch.zeros(64, dtype=dtype).view(torch.uint8)
    new = old.clone()
    new[:8] = torch.tensor([0x01, 0x7F, 0xC1, 0xFF, 0x00, 0x80, 0xFF, 0xFF], dtype=torch.uint8)
    hosts = [state.view(dtype) for state in (old, new)]
    old_bytes, new_bytes = (np.frombuffer(memory_of(host), np.uint8) for host in hosts)
    payload, _ = encode(old_bytes, new_bytes, encoding)
    assert np.array_equal(decode(old_bytes, payload, encoding), new_bytes)


def test_positions_beyond_4_gib(tmp_path) -> None:
    """Of a tensor of 6 GiB, which is a file with a hole."""
    size, start = 6 << 30, 5 << 30
    tensor = np.memmap(tmp_path / "tensor", np.uint8, "w+", shape=size)
    raw = pack_section(start, np.array([3, 70_000]), np.array([1, 2], np.uint8))
    ((found, positions, values),) = unpack_sections(raw)
    tensor[found:][positions] = values
    assert (tensor[start + 3], tensor[start + 70_000], tensor[start + 70_001]) == (1, 2, 0)


def test_the_wrong_bytes_are_refused() -> None:
    old = np.arange(100, dtype=np.uint8)
    new = old.copy()
    new[50:60] = 0
    for encoding in ENCODINGS:
        payload, _ = encode(old, new, encoding)
        with pytest.raises(DeltaError, match="not zstd"):
            decode(old, b"\0" * 30, encoding)
        with pytest.raises(DeltaError, match="has 55"):
            decode(old[:55], payload, encoding)
    with pytest.raises(ValueError, match="100 bytes can't become 99"):
        encode(old, new[:99], "xor")
    section = pack_section(0, np.array([1, 9]), np.array([7, 7], np.uint8))
    for damaged in (section[:-1], section[:5], b"\0" * 13):
        with pytest.raises(DeltaError, match="section"):
            list(unpack_sections(damaged))


@pytest.mark.parametrize("kind", CHECKSUMS)
def test_checksums_tell_states_apart(kind: str) -> None:
    state = np.arange(200, dtype=np.uint8)
    other = state.copy()
    other[100] ^= 1
    assert checksum(state, kind) == checksum(state.copy(), kind) != checksum(other, kind)


def test_adler32_is_zlibs() -> None:
    """https://en.wikipedia.org/wiki/Adler-32 has this value."""
    assert checksum(np.frombuffer(b"Wikipedia", np.uint8), "adler32") == "11e60398"
