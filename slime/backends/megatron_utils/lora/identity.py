"""What adapters belong to: their rank, scale, targets and base. A checkpoint of others is refused."""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import torch.distributed as dist

KEY = "lora"
_SAMPLED_TENSORS = 256
_SAMPLED_BYTES = 4096


def lora_identity(args: argparse.Namespace) -> dict[str, Any]:
    """Plain values that two runs must share to share adapters; all ranks take part."""
    return {
        "rank": args.lora_rank,
        "alpha": args.lora_alpha,
        "targets": sorted(set(args.lora_targets)),
        "base": str(Path(args.hf_checkpoint).absolute()),
        "base_fingerprint": _fingerprint_of_first_rank(args.hf_checkpoint),
    }


def check_identity(args: argparse.Namespace, directory: Path, saved: dict[str, Any] | None) -> None:
    """Whether the checkpoint in `directory` has the adapters of this run. The base may have moved, not changed.

    Raises:
        ValueError: it holds whole weights, or adapters of another rank, scale, targets or base; both values are named.
    """
    if saved is None:
        raise ValueError(
            f"{directory} holds whole weights, not LoRA adapters: with --lora-rank, --load is the folder of a LoRA "
            "run and the frozen base comes from --hf-checkpoint (tools/convert_torch_dist_to_hf.py makes one)"
        )
    ours = lora_identity(args)
    flags = {"rank": "--lora-rank", "alpha": "--lora-alpha", "targets": "--lora-targets"}
    differences = [
        f"{flag} is {_shown(saved[name])} there and {_shown(ours[name])} here"
        for name, flag in flags.items()
        if saved[name] != ours[name]
    ]
    if saved["base_fingerprint"] != ours["base_fingerprint"]:
        named = [f"{each['base']} (fingerprint {each['base_fingerprint']})" for each in (saved, ours)]
        differences.append(f"the base is {named[0]} there and {named[1]} here (--hf-checkpoint)")
    if differences:
        raise ValueError(f"the adapters in {directory} are not this run's: {'; '.join(differences)}")


def check_no_adapters(directory: Path, saved: dict[str, Any] | None) -> None:
    """ValueError where whole weights are wanted and the checkpoint holds adapters."""
    if saved is not None:
        raise ValueError(
            f"{directory} holds LoRA adapters (--lora-rank {saved['rank']} --lora-alpha {saved['alpha']:g} "
            f"--lora-targets {_shown(saved['targets'])}), not whole weights: they need --lora-rank, and can't be a "
            "reference, a teacher or a critic"
        )


@functools.cache
def fingerprint(path: str) -> str:
    """12 characters that tell a Hugging Face folder's weights from others': names, shapes and samples of the bytes.

    It reads the headers of the safetensors files and a few KiB of up to 256 tensors, wherever they are.
    """
    entries = sorted(entry for file in sorted(Path(path).glob("*.safetensors")) for entry in _tensors(file))
    digest = hashlib.sha256()
    for name, dtype, shape, *_ in entries:
        digest.update(f"{name} {dtype} {shape}\n".encode())
    for *_, file, start, end in entries[:: max(1, len(entries) // _SAMPLED_TENSORS)]:
        with open(file, "rb") as stream:
            stream.seek(max(start, (start + end - _SAMPLED_BYTES) // 2))
            digest.update(stream.read(min(_SAMPLED_BYTES, end - start)))
    return digest.hexdigest()[:12]


def _tensors(file: Path) -> list[tuple[str, str, list[int], str, int, int]]:
    """(name, dtype, shape, file, first byte, byte after the last) of each tensor, by safetensors' file format."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    return [
        (name, entry["dtype"], entry["shape"], str(file), *(8 + length + offset for offset in entry["data_offsets"]))
        for name, entry in header.items()
    ]


def _fingerprint_of_first_rank(path: str) -> str:
    value = [fingerprint(path) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(value, src=0)
    return value[0]


def _shown(value: Any) -> str:
    return " ".join(value) if isinstance(value, list) else f"{value:g}"
