"""Export the model as a Hugging Face directory that transformers and SGLang load."""

from __future__ import annotations

import argparse
import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime.backends.megatron_utils import atomic_directory
from slime.backends.megatron_utils.families import read_hf_config
from slime.backends.megatron_utils.hf_to_megatron.reader import INDEX_FILE, SINGLE_FILE
from slime.backends.megatron_utils.update_weight.hf_weight_iterator import HfWeightIterator, NamedTensors

logger = logging.getLogger(__name__)

_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")


def save_hf_model_to_path(args: argparse.Namespace, output_dir: str | Path, model: Sequence[torch.nn.Module]) -> None:
    """Write weights (in the training dtype), config and tokenizer as `output_dir`; all ranks take part, rank 0 writes.

    The config and the tokenizer's files are those of `args.hf_checkpoint`. The directory appears when it is complete
    and replaces one of the same name.

    Raises:
        RuntimeError: rank 0 could not write; raised on every rank.
    """
    target = Path(output_dir)
    iterator = HfWeightIterator(args, model)
    writer = _Writer(target, iterator.num_chunks) if dist.get_rank() == 0 else None
    for chunk in iterator.chunks():
        if writer is not None:
            writer.write(chunk)
    if writer is not None:
        writer.finish(Path(args.hf_checkpoint))
    failure = [writer.failure if writer is not None else None]
    dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise RuntimeError(f"the Hugging Face export to {target} failed: {failure[0]}")
    logger.info("exported %s", target)


class _Writer:
    """Writes on rank 0. An error is kept until the end: the other ranks are still in collectives with this one."""

    def __init__(self, target: Path, num_files: int) -> None:
        self._target = target
        self._num_files = num_files
        self._file_of: dict[str, str] = {}
        self._files = 0
        self._bytes = 0
        self._dtype: torch.dtype | None = None
        self.failure: str | None = None
        self._guard(lambda: atomic_directory.start_staging(target))

    def write(self, chunk: NamedTensors) -> None:
        self._guard(lambda: self._write(chunk))

    def finish(self, hf_checkpoint: Path) -> None:
        self._guard(lambda: self._finish(hf_checkpoint))

    def _guard(self, job: Any) -> None:
        if self.failure is not None:
            return
        try:
            job()
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"

    def _write(self, chunk: NamedTensors) -> None:
        from safetensors.torch import save_file

        self._files += 1
        name = SINGLE_FILE if self._num_files == 1 else f"model-{self._files:05d}-of-{self._num_files:05d}.safetensors"
        # clones: tensors may be views of one another's storage, which safetensors refuses
        tensors = {key: tensor.detach().to("cpu", copy=True) for key, tensor in chunk}
        save_file(tensors, atomic_directory.staging_path(self._target) / name, metadata={"format": "pt"})
        self._file_of.update(dict.fromkeys(tensors, name))
        self._bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        self._dtype = next(iter(tensors.values())).dtype

    def _finish(self, hf_checkpoint: Path) -> None:
        staging = atomic_directory.staging_path(self._target)
        copy_assets(hf_checkpoint, staging)
        config = read_hf_config(hf_checkpoint)
        dtype_key = "torch_dtype" if "torch_dtype" in config else "dtype"
        config[dtype_key] = str(self._dtype).removeprefix("torch.")
        (staging / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        if self._num_files > 1:
            index = {"metadata": {"total_size": self._bytes}, "weight_map": dict(sorted(self._file_of.items()))}
            (staging / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
        atomic_directory.publish_directory(self._target)


def copy_assets(source: Path, target: Path) -> None:
    """Copy the files of a Hugging Face directory that are not weights: tokenizer, generation config, chat template."""
    for entry in sorted(source.iterdir()):
        if entry.is_file() and not entry.name.endswith(_WEIGHT_FILES) and not entry.name.startswith("."):
            shutil.copyfile(entry, target / entry.name)
