"""SGLang's CPU platform plug-in: it takes effect only where it is selected, and its hash is MurmurHash3."""

from __future__ import annotations

import struct
from importlib.metadata import entry_points

import pytest
import torch

from slime_plugins import sglang_cpu
from slime_plugins.sglang_cpu.murmur_hash import murmur_hash32
from slime_plugins.sglang_cpu.shared_expert_gate import fused_gate_sigmoid_mul_add


@pytest.mark.parametrize("platform", [None, "", "cuda", "other_plugin"])
def test_it_does_nothing_where_another_platform_serves(monkeypatch: pytest.MonkeyPatch, platform: str | None) -> None:
    if platform is None:
        monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    else:
        monkeypatch.setenv("SGLANG_PLATFORM", platform)
    monkeypatch.setattr(sglang_cpu, "SGLANG_VERSION", "another")  # not even the version is looked at
    assert sglang_cpu.activate() is None
    sglang_cpu.register()


def test_it_is_selected_by_its_entry_points_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLATFORM", "slime_cpu")
    (platform,) = entry_points(group="sglang.srt.platforms", name="slime_cpu")
    assert platform.load()() == "slime_plugins.sglang_cpu.platform.PlainCpuPlatform"
    (plugin,) = entry_points(group="sglang.srt.plugins", name="slime_cpu")
    assert plugin.load() is sglang_cpu.register


def test_another_sglang_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLATFORM", "slime_cpu")
    monkeypatch.setattr(sglang_cpu, "SGLANG_VERSION", "0.0.1")
    for entry in (sglang_cpu.activate, sglang_cpu.register):
        with pytest.raises(RuntimeError, match=r"written for sglang 0\.0\.1, but sglang \d"):
            entry()


@pytest.mark.parametrize(
    ("ranks", "cores", "bound"),
    [(2, [0, 1], "0|1"), (2, [0, 1, 2, 3], "0,1|2,3"), (2, [4, 5, 9], "4|5,9"), (3, [0, 1], "0|0|1"), (2, [6], "6|6")],
)
def test_every_rank_has_a_core(ranks: int, cores: list[int], bound: str) -> None:
    assert sglang_cpu.cores_of_ranks(ranks, cores) == bound


def murmur3_x86_32(data: bytes) -> int:
    """Appleby's reference, for a length that is a multiple of 4, with seed 0."""

    def rotate(word: int, bits: int) -> int:
        return ((word << bits) | (word >> (32 - bits))) & 0xFFFFFFFF

    state = 0
    for (block,) in struct.iter_unpack("<I", data):
        block = rotate((block * 0xCC9E2D51) & 0xFFFFFFFF, 15) * 0x1B873593 & 0xFFFFFFFF
        state = (rotate(state ^ block, 13) * 5 + 0xE6546B64) & 0xFFFFFFFF
    state ^= len(data)
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return state ^ (state >> 16)


def test_hash_equals_the_reference() -> None:
    assert murmur3_x86_32(b"test") == 0xBA6BD213  # a published value
    seeds = [0, 1, 42, 2**31 - 1, 2**32 + 5, 2**63 - 1]
    positions = [0, 1, 7, 100, 4095, 2**31 - 1]
    columns = [0, 1, 511, 151_935]
    found = murmur_hash32(torch.tensor(seeds), torch.tensor(positions), torch.tensor(columns))
    assert found.dtype == torch.uint32 and found.shape == (6, 4)
    expected = [
        [murmur3_x86_32(struct.pack("<QII", seed, position, column)) for column in columns]
        for seed, position in zip(seeds, positions, strict=True)
    ]
    assert found.to(torch.int64).tolist() == expected


def test_gate_of_a_shared_expert() -> None:
    """sigmoid(x . w) x shared, added in place, against float64."""
    hidden, shared, total = (torch.randn(3, 8, dtype=torch.bfloat16) for _ in range(3))
    weight, before = torch.randn(8, dtype=torch.bfloat16), total.double()
    fused_gate_sigmoid_mul_add(hidden, weight, shared, total)
    gate = torch.sigmoid(hidden.double() @ weight.double())[:, None]
    torch.testing.assert_close(total.double(), before + gate * shared.double(), rtol=2e-2, atol=2e-2)
