"""Weights by way of a shared folder, as what has changed since the update before."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slime.backends.megatron_utils import atomic_directory
from slime.backends.megatron_utils.safetensors_file import memory_of
from slime.backends.megatron_utils.update_weight.base import WeightsGetter
from slime.backends.megatron_utils.update_weight.engine_calls import engine_seconds, on_first_rank, together
from slime.backends.megatron_utils.update_weight.from_disk import NamedTensors, UpdateWeightFromDisk
from slime.ray.utils import get_all
from slime.utils import disk_delta
from slime.utils.checkpoint_folder import INDEX_FILE, WeightsId
from slime.utils.distributed_utils import get_gloo_group

_THREADS = min(4, os.cpu_count() or 1)  # of each rank, and a host has many


class UpdateWeightFromDiskDelta(UpdateWeightFromDisk):
    """An update holds the changed bytes of the changed tensors. Engines' hosts keep a checkpoint each
    (`args.update_weight_local_checkpoint_dir`), bring it to the new state, and engines load that.

    All weights go instead when a host does not hold the state before: at the first update, whatever the engines were
    started from, after a host or a pull has failed, and when a new host has joined.

    Each rank remembers the last state of the chunks that are its to write, on the host.
    """

    def __init__(self, args: Namespace, model: Sequence[torch.nn.Module], weights_getter: WeightsGetter) -> None:
        super().__init__(args, model, weights_getter)
        self._base: WeightsId | None = None
        self._sent: dict[str, disk_delta.Bytes] = {}

    def _write(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        base, weights_id = self._shared_base(), self._new_id()
        self._base = None  # while it is written, what is remembered is of both states
        if base is None:
            self._sent = {}
            self._write_full(folder, weights, weights_id, self._remember)
            self._note_size(folder, changed=self._iterator.total_bytes, total=self._iterator.total_bytes)
        else:
            self._write_delta(folder, weights, weights_id, base)
        self._base = weights_id

    def _shared_base(self) -> WeightsId | None:
        """What every host holds, if that is what this rank remembers."""
        answer: list[bool] = [False]

        def ask() -> None:
            refs = [engine.get_pulled_weights.remote() for engine in self._engines]
            held = get_all(
                refs, timeout=engine_seconds(self.args), what="asking which weights the engines' hosts hold"
            )
            answer[0] = all(one == self._base for one in held)

        if self._base is not None:
            on_first_rank(ask)
            dist.broadcast_object_list(answer, src=0, group=get_gloo_group())
        return self._base if answer[0] else None

    def _remember(self, chunk: NamedTensors) -> None:
        for name, tensor in chunk:
            host = tensor.detach().cpu().contiguous()
            self._sent[name] = np.frombuffer(memory_of(host), np.uint8).copy()

    def _write_delta(
        self, folder: Path, weights: Mapping[str, Tensor], weights_id: WeightsId, base: WeightsId
    ) -> None:
        on_first_rank(lambda: atomic_directory.start_staging(folder))
        part = _Part(self._sent, self.args.update_weight_delta_encoding, self.args.update_weight_delta_checksum)
        self._write_own_chunks(weights, lambda number, chunk: part.add(chunk))
        file = f"model-{dist.get_rank():05d}-of-{dist.get_world_size():05d}.safetensors"
        together(lambda: part.save(atomic_directory.staging_path(folder) / file))
        facts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(facts, (file, sorted(part.payloads), part.changed, part.total), group=get_gloo_group())
        metadata = {
            "version": weights_id.version,
            "id": weights_id.id,
            "base_version": base.version,
            "base_id": base.id,
            "delta_encoding": self.args.update_weight_delta_encoding,
            "compression_format": disk_delta.COMPRESSION,
            "checksum_format": self.args.update_weight_delta_checksum,
        }
        file_of = {name: file for file, names, _, _ in facts for name in names}

        def finish() -> None:
            index = json.dumps({"metadata": metadata, "weight_map": file_of}, indent=2) + "\n"
            (atomic_directory.staging_path(folder) / INDEX_FILE).write_text(index)
            atomic_directory.publish_directory(folder)

        on_first_rank(finish)
        self._note_size(folder, changed=sum(fact[2] for fact in facts), total=sum(fact[3] for fact in facts))

    def _note_size(self, folder: Path, changed: int, total: int) -> None:
        if dist.get_rank() == 0:
            self._metrics["update_weights_density"] = changed / total
            size = sum(file.stat().st_size for file in folder.iterdir())
            self._metrics["update_weights_wire_bytes"] = float(size)


class _Part:
    """What one rank writes of a delta.

    Args:
        sent: the last state by name, which is brought to the new one.
        encoding, checksum: see `disk_delta`.

    Attributes:
        payloads: encoded changes by name, of the tensors that have any.
        changed, total: bytes.
    """

    def __init__(self, sent: dict[str, disk_delta.Bytes], encoding: str, checksum: str) -> None:
        self._sent = sent
        self._encoding = encoding
        self._checksum = checksum
        self._digests: dict[str, str] = {}
        self.payloads: dict[str, disk_delta.Bytes] = {}
        self.changed = self.total = 0

    def add(self, chunk: NamedTensors) -> None:
        with ThreadPoolExecutor(_THREADS) as pool:  # what takes the time releases the interpreter's lock
            encoded = list(pool.map(lambda named: self._encode(*named), chunk))
        for (name, _), (payload, changed, size, digest) in zip(chunk, encoded, strict=True):
            self.total += size
            if changed:
                self.changed += changed
                self.payloads[name] = np.frombuffer(payload, np.uint8)
                self._digests[name] = digest

    def _encode(self, name: str, tensor: Tensor) -> tuple[bytes, int, int, str]:
        """A tensor's changes, how many of its bytes have changed, how many it has, and the new ones' checksum."""
        host = tensor.detach().cpu().contiguous()
        old, new = self._sent[name], np.frombuffer(memory_of(host), np.uint8)
        payload, changed = disk_delta.encode(old, new, self._encoding)
        if not changed:
            return payload, 0, new.size, ""
        old[:] = new
        return payload, changed, new.size, disk_delta.checksum(new, self._checksum)

    def save(self, path: Path) -> None:
        """Write the file; none when nothing has changed."""
        from safetensors.numpy import save

        if self.payloads:
            path.write_bytes(save(self.payloads, self._digests))
