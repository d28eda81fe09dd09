"""Export the model as a Hugging Face directory that transformers and SGLang load."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime.backends.megatron_utils import atomic_directory
from slime.backends.megatron_utils.families import family_of_checkpoint, read_hf_config
from slime.backends.megatron_utils.hf_to_megatron.reader import INDEX_FILE, SINGLE_FILE, SafetensorReader
from slime.backends.megatron_utils.safetensors_file import write_safetensors
from slime.backends.megatron_utils.update_weight.hf_weight_iterator import HfWeightIterator, NamedTensors

logger = logging.getLogger(__name__)

_TRAINING_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_COPIED_AT_ONCE = 1 << 30  # bytes
_SCALES = ("_scale", "_scale_inv")
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")


def save_hf_model_to_path(args: argparse.Namespace, output_dir: str | Path, model: Sequence[torch.nn.Module]) -> None:
    """Write weights, config and tokenizer as `output_dir`; all ranks take part, rank 0 writes.

    The config and the tokenizer's files are those of `args.hf_checkpoint`. Weights have the training dtype, or the low
    precision that they have there. The directory appears when it is complete
    and replaces one of the same name.

    Raises:
        RuntimeError: rank 0 could not write; raised on every rank.
    """
    writer = _DeferredErrors(HfWriter(Path(output_dir), Path(args.hf_checkpoint))) if dist.get_rank() == 0 else None
    for chunk in HfWeightIterator(args, model).chunks():
        if writer is not None:
            writer.run(HfWriter.write, chunk)
    if writer is not None:
        writer.run(HfWriter.copy_kept)
        writer.run(HfWriter.finish)
    failure = [writer.failure if writer is not None else None]
    dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise RuntimeError(f"the Hugging Face export to {output_dir} failed: {failure[0]}")
    if dist.get_rank() == 0:
        logger.info("exported %s", output_dir)


@dataclasses.dataclass
class WrittenPart:
    """What one process has written of a directory.

    Attributes:
        names: tensor names by number of the file.
        size: bytes of tensors.
        dtypes: elements by training dtype.
    """

    names: dict[int, list[str]] = dataclasses.field(default_factory=dict)
    size: int = 0
    dtypes: collections.Counter[torch.dtype] = dataclasses.field(default_factory=collections.Counter)

    def add(self, other: WrittenPart) -> None:
        self.names |= other.names
        self.size += other.size
        self.dtypes += other.dtypes


class HfWriter:
    """Writes a Hugging Face directory, one safetensors file per chunk; it takes its name in `finish`.

    Several processes can write one: the first calls `start` before all others `join`, each writes under numbers of its
    own, and the first adds their `part`s before it finishes.

    Args:
        target: the directory to write.
        hf_checkpoint: the directory that gives the config and the tokenizer.
        config_changes: entries of the config to set; None takes an entry out.
    """

    def __init__(self, target: Path, hf_checkpoint: Path, config_changes: Mapping[str, Any] | None = None) -> None:
        self._config_changes = dict(config_changes or {})
        self._target = target
        self._hf_checkpoint = hf_checkpoint
        self._staging: Path | None = None
        self.part = WrittenPart()

    def start(self) -> None:
        """Make the folder that becomes the directory; what an interrupted write left there is removed."""
        self._staging = atomic_directory.start_staging(self._target)

    def join(self) -> None:
        """Write into the folder that another process started."""
        self._staging = atomic_directory.staging_path(self._target)

    def write(self, chunk: NamedTensors, number: int | None = None) -> None:
        """The next file, or the one with this number."""
        if self._staging is None:
            self.start()
        assert self._staging is not None
        number = len(self.part.names) if number is None else number
        self.part.size += write_safetensors(self._staging / str(number), chunk)
        self.part.names[number] = [name for name, _ in chunk]
        for name, tensor in chunk:
            if tensor.dtype in _TRAINING_DTYPES and not name.endswith(_SCALES):
                self.part.dtypes[tensor.dtype] += tensor.numel()

    def write_text(self, name: str, text: str) -> None:
        """A file beside the weights."""
        assert self._staging is not None
        (self._staging / name).write_text(text)

    def copy_kept(self) -> None:
        """Copy what the model does not hold and the checkpoint has: a vision tower, layers that predict ahead."""
        config = read_hf_config(self._hf_checkpoint)
        layers = (config.get("text_config") or config)["num_hidden_layers"]
        family = family_of_checkpoint(self._hf_checkpoint)
        written = {name for names in self.part.names.values() for name in names}
        predicts_ahead = any(family.is_mtp(name, layers) for name in written)
        reader = SafetensorReader(self._hf_checkpoint)
        chunk, size = [], 0
        for name in reader.in_file_order():
            held = name in written or (predicts_ahead and family.is_mtp(name, layers))
            if held or not family.is_kept(name, layers):
                continue
            chunk.append((name, reader.get_tensor(name)))
            size += chunk[-1][1].nbytes
            if size >= _COPIED_AT_ONCE:
                self.write(chunk)
                chunk, size = [], 0
        if chunk:
            self.write(chunk)

    def finish(self) -> None:
        """Name the files, add index, config and tokenizer, and publish the directory."""
        if self._staging is None:
            raise ValueError(f"there are no weights to write to {self._target}")
        names = self._file_names()
        numbers = sorted(self.part.names)
        for number, name in zip(numbers, names, strict=True):
            (self._staging / str(number)).rename(self._staging / name)
        if len(names) > 1:
            file_of = zip(numbers, names, strict=True)
            weight_map = {key: name for number, name in file_of for key in self.part.names[number]}
            index = {"metadata": {"total_size": self.part.size}, "weight_map": dict(sorted(weight_map.items()))}
            (self._staging / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
        copy_assets(self._hf_checkpoint, self._staging)
        config = read_hf_config(self._hf_checkpoint)
        for dtype, _ in self.part.dtypes.most_common(1):
            config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(dtype).removeprefix("torch.")
        for key, value in self._config_changes.items():
            config.pop(key, None)
            config |= {} if value is None else {key: value}
        (self._staging / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        atomic_directory.publish_directory(self._target)

    def _file_names(self) -> list[str]:
        count = len(self.part.names)
        if count == 1:
            return [SINGLE_FILE]
        return [f"model-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count)]


class _DeferredErrors:
    """Keeps the first error until the end: the other ranks are still in collectives with this one."""

    def __init__(self, target: HfWriter) -> None:
        self._target = target
        self.failure: str | None = None

    def run(self, method: Callable[..., None], *arguments: Any) -> None:
        if self.failure is not None:
            return
        try:
            method(self._target, *arguments)
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"


def copy_assets(source: Path, target: Path) -> None:
    """Copy the files of a Hugging Face directory that are not weights: tokenizer, generation config, chat template."""
    for entry in sorted(source.iterdir()):
        if entry.is_file() and not entry.name.endswith(_WEIGHT_FILES) and not entry.name.startswith("."):
            shutil.copyfile(entry, target / entry.name)
