"""Convert a Hugging Face folder to another precision, one shard at a time: what the tools/convert_hf_to_* share."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime.backends.megatron_utils.hf_checkpoint_saver import HfWriter
from slime.backends.megatron_utils.hf_to_megatron.dequantizing_reader import open_weights
from slime.backends.megatron_utils.hf_to_megatron.reader import SafetensorReader
from slime.backends.megatron_utils.low_precision.scheme import WEIGHT, Scheme

_GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a conversion will do.

    Attributes:
        quantized: names of the weights that get low precision.
        kept: names of the others.
        kept_modules: those of `kept` that are matrices of modules, without embeddings: for the config's list.
        bytes_before, bytes_after: of the data; scales are not counted.
    """

    quantized: list[str]
    kept: list[str]
    kept_modules: list[str]
    bytes_before: int
    bytes_after: int

    def describe(self) -> str:
        return (
            f"{len(self.quantized)} weights change their precision, {len(self.kept)} tensors stay as they are: "
            f"{self.bytes_before / _GIB:.2f} GiB -> about {self.bytes_after / _GIB:.2f} GiB"
        )


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that all conversions of folders have."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model-dir", required=True, type=Path, help="Hugging Face folder to read")
    options.add_argument("--save-dir", required=True, type=Path, help="Hugging Face folder to write")
    options.add_argument(
        "--max-shard-size", type=int, default=2 << 30, help="bytes per file, about; so much is held in memory"
    )
    options.add_argument("--dry-run", action="store_true", help="say what would be done, and stop")
    options.add_argument("-f", "--force", action="store_true", help="replace --save-dir if it exists")
    return options


def make_plan(reader: SafetensorReader, scheme: Scheme | None) -> Plan:
    """Which weights the scheme covers; None: low-precision weights become bfloat16."""
    quantized, kept, kept_modules, before, after = [], [], [], 0, 0
    for name in sorted(reader.names):
        shape, stored_bytes, is_stored_low = reader.describe(name)
        numbers = int(torch.Size(shape).numel())
        before += stored_bytes
        if scheme is not None and scheme.covers(name, torch.empty(shape, device="meta")):
            quantized.append(name)
            after += numbers * scheme.bits // 8
            continue
        if scheme is None and is_stored_low:
            quantized.append(name)
        else:
            kept.append(name)
        after += 2 * numbers if is_stored_low else stored_bytes
        if name.endswith(WEIGHT) and len(shape) == 2 and "embed" not in name:
            kept_modules.append(name.removesuffix(WEIGHT))
    return Plan(quantized, kept, kept_modules, before, after)


def convert_folder(
    options: argparse.Namespace, scheme: Scheme | None, quantization_config: dict[str, Any] | None
) -> None:
    """Do what the command line asks for: plan, check, convert with a progress bar; the folder appears when complete.

    Args:
        scheme: how to store the weights that it covers; None: everything in full precision.
        quantization_config: for the config.json; `modules_to_not_convert` and `ignore` are completed by what the plan
            leaves out.

    Raises:
        SystemExit: there is nothing to convert, or the target exists.
    """
    if options.save_dir.exists() and not options.force:
        raise SystemExit(f"{options.save_dir} exists; --force replaces it")
    reader = open_weights(options.model_dir)
    plan = make_plan(reader, scheme)
    print(f"{options.model_dir} -> {options.save_dir}: {plan.describe()}")
    if not plan.quantized:
        raise SystemExit(f"no weight of {options.model_dir} would change its precision")
    if scheme is not None:
        for name in plan.quantized:  # now rather than after hours
            scheme.check(name, reader.describe(name)[0])
    if options.dry_run:
        return
    changes = {"quantization_config": _complete(quantization_config, plan)}
    writer = HfWriter(options.save_dir, options.model_dir, changes)
    for shard in _shards(reader, plan, scheme, options.max_shard_size):
        writer.write(shard)
    writer.finish()
    print(f"written: {options.save_dir}")


def _shards(
    reader: SafetensorReader, plan: Plan, scheme: Scheme | None, max_bytes: int
) -> Iterator[list[tuple[str, Tensor]]]:
    from tqdm import tqdm

    low = set(plan.quantized)
    shard: list[tuple[str, Tensor]] = []
    size = 0
    with tqdm(total=plan.bytes_before, unit="B", unit_scale=True, desc="converting") as progress:
        for name in reader.in_file_order():
            _, stored_bytes, is_stored_low = reader.describe(name)
            weight = reader.get_tensor(name)
            if scheme is not None and name in low:
                parts = scheme.quantize(name, weight)
            else:
                parts = [(name, weight.to(torch.bfloat16) if is_stored_low else weight)]
            shard.extend(parts)
            size += sum(tensor.numel() * tensor.element_size() for _, tensor in parts)
            progress.update(stored_bytes)
            if size >= max_bytes:
                yield shard
                shard, size = [], 0
    if shard:
        yield shard


def _complete(config: dict[str, Any] | None, plan: Plan) -> dict[str, Any] | None:
    if config is None:
        return None
    for key in ("modules_to_not_convert", "ignore"):
        if key in config:
            config = {**config, key: sorted({*config[key], *plan.kept_modules})}
    return config
