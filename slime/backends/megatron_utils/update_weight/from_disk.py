"""Weights by way of a shared folder: a checkpoint per update, which the engines load."""

from __future__ import annotations

import functools
import json
import shutil
import uuid
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime.backends.megatron_utils import atomic_directory
from slime.backends.megatron_utils.hf_checkpoint_saver import HfWriter
from slime.backends.megatron_utils.update_weight.base import WeightsGetter, WeightUpdater
from slime.backends.megatron_utils.update_weight.engine_calls import on_first_rank, together
from slime.backends.megatron_utils.update_weight.errors import WeightUpdateError
from slime.utils.checkpoint_folder import STATE_FILE, WeightsId, version_folder
from slime.utils.distributed_utils import get_gloo_group
from slime.utils.misc import load_function

NamedTensors = Sequence[tuple[str, Tensor]]


class UpdateWeightFromDisk(WeightUpdater):
    """The ranks write `args.update_weight_disk_dir/weight_v%06d`, a complete Hugging Face directory that takes its
    name when it is whole, and copy it to the engines' hosts if there is a folder for it, all while engines generate.
    """

    def __init__(self, args: Namespace, model: Sequence[torch.nn.Module], weights_getter: WeightsGetter) -> None:
        super().__init__(args, model, weights_getter)
        self._written: list[Path] = []

    def connect_rollout_engines(
        self,
        rollout_engines: Sequence[Any],
        rollout_engine_lock: Any,
        engine_gpu_counts: Sequence[int] | None = None,
        engine_gpu_offsets: Sequence[int] | None = None,
        engine_parallel_configs: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """See the base class."""
        self._engines = rollout_engines

    def _prepare(self, weights: Mapping[str, Tensor]) -> None:
        folder = version_folder(self.args.update_weight_disk_dir, self.weight_version)
        self._written.append(folder)
        try:
            self._write(folder, weights)
        except WeightUpdateError:
            if dist.get_rank() == 0:
                shutil.rmtree(atomic_directory.staging_path(folder), ignore_errors=True)
            raise
        if self.args.custom_update_weight_post_write_path is not None:
            hook = load_function(self.args.custom_update_weight_post_write_path)
            together(lambda: hook(self.args, str(folder), self._engines))
        on_first_rank(lambda: self._call_all("pull_weights", self.weight_version))

    def _write(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Write the update; all ranks take part.

        Raises:
            WeightUpdateError: one could not; on every rank.
        """
        self._write_full(folder, weights, self._new_id())

    def _transfer(self, weights: Mapping[str, Tensor]) -> None:
        local = self.args.update_weight_local_checkpoint_dir
        path = local or str(version_folder(self.args.update_weight_disk_dir, self.weight_version))
        # the cache was flushed already, unless running requests keep theirs
        on_first_rank(lambda: self._call_all("update_weights_from_disk", path, None, None, False))

    def _conclude(self) -> None:
        """Remove what the engines have loaded, and what updates that failed have left."""
        if not self.args.update_weight_disk_keep_files and dist.get_rank() == 0:
            for folder in self._written:
                shutil.rmtree(folder, ignore_errors=True)
        self._written = []

    def _new_id(self) -> WeightsId:
        """A name for these weights that no other run gives, the same on every rank."""
        name = [uuid.uuid4().hex]
        dist.broadcast_object_list(name, src=0, group=get_gloo_group())
        return WeightsId(self.weight_version, name[0])

    def _write_full(
        self,
        folder: Path,
        weights: Mapping[str, Tensor],
        weights_id: WeightsId,
        on_chunk: Callable[[NamedTensors], None] = lambda chunk: None,
    ) -> None:
        """Write a whole checkpoint: every rank some of the chunks.

        Args:
            on_chunk: called with the chunks that this rank writes.
        """
        writer, is_first = HfWriter(folder, Path(self.args.hf_checkpoint)), dist.get_rank() == 0
        on_first_rank(writer.start)
        if not is_first:
            writer.join()

        def write(number: int, chunk: NamedTensors) -> None:
            writer.write(list(chunk), number)
            on_chunk(chunk)

        self._write_own_chunks(weights, write)
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, writer.part, group=get_gloo_group())

        def finish() -> None:
            for part in parts[1:]:
                writer.part.add(part)
            writer.copy_kept()
            writer.write_text(STATE_FILE, json.dumps({"version": weights_id.version, "id": weights_id.id}) + "\n")
            writer.finish()

        on_first_rank(finish)

    def _write_own_chunks(self, weights: Mapping[str, Tensor], write: Callable[[int, NamedTensors], None]) -> None:
        """Gather all chunks and call `write` with the number and tensors of those that are this rank's to write.

        After an error the gathering goes on, since other ranks take part in it; then it is raised on every rank.
        """
        error: Exception | None = None
        for number, chunk in enumerate(self._iterator.chunks(weights)):
            if error is not None or number % dist.get_world_size() != dist.get_rank():
                continue
            try:
                write(number, chunk)
            except Exception as raised:
                error = raised
        together(functools.partial(_raise, error))


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error
