"""What changed in a tensor's bytes, and how it is written: pure functions on uint8 arrays, whatever the dtype.

Encodings, both compressed with zstd:

- xor: old ^ new, as long as the tensor; zeros where nothing changed;
- overwrite: positions and new bytes of what changed, in sections of one block of the tensor each: the block's start
  (u64), how many bytes changed (u32), the width of a position (u8: 1, 2 or 4), each position as its distance from the
  one before, then the new bytes. Positions count from the start of the block, so a tensor may have any size.

It needs neither torch nor SGLang: engine actors read deltas too.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
import zstandard
from numpy.typing import NDArray

Bytes: TypeAlias = NDArray[np.uint8]

COMPRESSION = "zstd"
LEVEL = 1
BLOCK = 1 << 24
_SECTION = struct.Struct("<QIB")
_WIDTHS: dict[int, type[np.unsignedinteger]] = {1: np.uint8, 2: np.uint16, 4: np.uint32}


class DeltaError(ValueError):
    """Bytes that are no delta of this tensor."""


def encode(old: Bytes, new: Bytes, encoding: str) -> tuple[bytes, int]:
    """What makes `new` of `old`, and how many bytes differ; empty bytes when none do.

    Raises:
        ValueError: the sizes differ, or there is no such encoding.
    """
    if old.shape != new.shape:
        raise ValueError(f"{old.size} bytes can't become {new.size}")
    if encoding == "xor":
        difference = np.bitwise_xor(old, new)
        changed = int(np.count_nonzero(difference))
        raw: bytes | memoryview = memoryview(difference)
    elif encoding == "overwrite":
        changed, raw = _overwrites(old, new)
    else:
        raise ValueError(f"there is no delta encoding {encoding!r}")
    return (zstandard.ZstdCompressor(level=LEVEL).compress(raw), changed) if changed else (b"", 0)


def decode(old: Bytes, payload: bytes | memoryview, encoding: str) -> Bytes:
    """The new bytes; `old` stays as it is. The opposite of `encode`.

    Raises:
        DeltaError: the payload is damaged or belongs to a tensor of another size.
    """
    if len(payload) == 0:
        return old.copy()
    try:
        raw = zstandard.ZstdDecompressor().decompress(payload)
    except zstandard.ZstdError as error:
        raise DeltaError(f"not {COMPRESSION}: {error}") from error
    if encoding == "overwrite":
        return _overwritten(old, raw)
    if encoding != "xor":
        raise DeltaError(f"there is no delta encoding {encoding!r}")
    if len(raw) != old.size:
        raise DeltaError(f"it is for {len(raw)} bytes, the tensor has {old.size}")
    return np.bitwise_xor(old, np.frombuffer(raw, np.uint8))


def _overwrites(old: Bytes, new: Bytes) -> tuple[int, bytes]:
    changed, pieces = 0, []
    for start in range(0, new.size, BLOCK):
        block = new[start : start + BLOCK]
        positions = np.flatnonzero(old[start : start + BLOCK] != block)
        if positions.size:
            changed += positions.size
            pieces.append(pack_section(start, positions, block[positions]))
    return changed, b"".join(pieces)


def _overwritten(old: Bytes, raw: bytes) -> Bytes:
    new = old.copy()
    for start, positions, values in unpack_sections(raw):
        if start + int(positions[-1]) >= new.size:
            raise DeltaError(f"it writes byte {start + int(positions[-1])} of a tensor that has {new.size}")
        new[start:][positions] = values
    return new


def pack_section(start: int, positions: NDArray[np.integer], values: Bytes) -> bytes:
    """A section of an overwrite; `positions` count from `start` and ascend."""
    distances = np.diff(positions, prepend=0)
    width = next(width for width in _WIDTHS if int(distances.max()) < 1 << 8 * width)
    header = _SECTION.pack(start, positions.size, width)
    return header + distances.astype(_WIDTHS[width]).tobytes() + values.tobytes()


def unpack_sections(raw: bytes) -> Iterator[tuple[int, NDArray[np.int64], Bytes]]:
    """(start, positions, values) of each section.

    Raises:
        DeltaError: the bytes end within a section, or are none.
    """
    at = 0
    while at < len(raw):
        if at + _SECTION.size > len(raw):
            raise DeltaError("it ends within a section's header")
        start, count, width = _SECTION.unpack_from(raw, at)
        at += _SECTION.size
        if width not in _WIDTHS or count == 0 or at + count * (width + 1) > len(raw):
            raise DeltaError(f"a section of {count} positions of {width} bytes does not fit")
        distances = np.frombuffer(raw, _WIDTHS[width], count, at)
        at += count * width
        yield start, np.cumsum(distances, dtype=np.int64), np.frombuffer(raw, np.uint8, count, at)
        at += count


def _xxh3_128(data: Bytes) -> str:
    import xxhash

    return xxhash.xxh3_128_hexdigest(data)


def _blake3(data: Bytes) -> str:
    import blake3

    return blake3.blake3(data).hexdigest()


def _adler32(data: Bytes) -> str:
    return f"{zlib.adler32(data):08x}"


CHECKSUMS: dict[str, Callable[[Bytes], str]] = {"xxh3-128": _xxh3_128, "blake3": _blake3, "adler32": _adler32}


def checksum(data: Bytes, kind: str) -> str:
    """Hexadecimal digest of a tensor's bytes.

    Raises:
        DeltaError: there is no such checksum.
    """
    if kind not in CHECKSUMS:
        raise DeltaError(f"there is no checksum {kind!r}")
    return CHECKSUMS[kind](data)
