"""--check-weight-update-equal: the trainer's side of the proof that the engines have its weights."""

from __future__ import annotations

import logging
import shutil
from argparse import Namespace
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from slime.ray.utils import get_all
from slime.utils.distributed_utils import get_gloo_group

logger = logging.getLogger(__name__)

VERIFY_SECONDS = 1800.0


def verify_engines(
    args: Namespace, chunks: Iterable[Sequence[tuple[str, Tensor]]], engines: Sequence[Any], weight_version: int
) -> None:
    """Write the weights as a checkpoint to the log folder and let every engine compare what it has with that.

    Every rank calls it; the engines must reach the folder. What is written is removed again.

    Raises:
        WeightMismatch: (as the cause of Ray's error) naming the tensors that differ.
    """
    folder = Path(args.log_dir) / "weight-check" / f"weights-{weight_version}"
    is_first = dist.get_rank() == 0
    if is_first:
        folder.mkdir(parents=True, exist_ok=True)
    for index, chunk in enumerate(chunks):
        if is_first:
            _write(folder / f"model-{index:05d}.safetensors", chunk)
    if is_first:
        refs = [engine.verify_weights.remote(str(folder)) for engine in engines]
        equal = get_all(refs, timeout=VERIFY_SECONDS, what="comparing the engines' weights with the trainer's")
        shutil.rmtree(folder.parent)
        logger.info("weights %d: %s tensors of the engines equal the trainer's bit for bit", weight_version, equal)
    dist.barrier(get_gloo_group())


def _write(path: Path, chunk: Sequence[tuple[str, Tensor]]) -> None:
    from safetensors.torch import save_file

    # copies: tensors of a chunk may be views of one weight, which a file can't hold
    save_file({name: tensor.detach().cpu().clone().contiguous() for name, tensor in chunk}, path)
