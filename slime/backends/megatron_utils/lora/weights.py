"""Adapters by name, and host copies of them: other policies on the same base cost next to nothing."""

from __future__ import annotations

import argparse
import os
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from slime.backends.megatron_utils.lora.adapter import AdapterParameter
from slime.backends.megatron_utils.lora.attach import adapters_of
from slime.backends.megatron_utils.update_weight.common import named_params_and_buffers
from slime.backends.megatron_utils.weights_backuper import WeightsBackuper

BASE = "base"


def adapter_parameters(model: Sequence[torch.nn.Module]) -> Iterator[AdapterParameter]:
    """Every trained matrix of this rank's model chunks."""
    for adapters in adapters_of(model):
        yield from adapters.named()


def named_adapters(model: Sequence[torch.nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """(name, this rank's part)."""
    for entry in adapter_parameters(model):
        yield entry.name, entry.parameter


class LoraWeights:
    """Named copies ("tags") of a model's policies, as `WeightsBackuper` has them, but of adapters only.

    A tag has adapters and a base. All tags share the model's own base, unless `backup_other` gave them another
    (a reference or teacher that is another model); only then, or where the trainer sleeps, is the base copied.

    Args:
        copy_base: keep a copy of the base, for the times when the model is off the device.
    """

    def __init__(self, args: argparse.Namespace, model: Sequence[torch.nn.Module], copy_base: bool) -> None:
        self._args = args
        self._adapters = WeightsBackuper(lambda: named_adapters(model))
        self._bases = WeightsBackuper(lambda: named_params_and_buffers(args, model))
        self._base_of: dict[str, str] = {}
        self._live_base = BASE
        if copy_base:
            self._bases.backup(BASE)

    @property
    def tags(self) -> tuple[str, ...]:
        return self._adapters.tags

    def backup(self, tag: str) -> None:
        """Copy the live adapters under `tag`."""
        self._adapters.backup(tag)
        self._base_of[tag] = self._live_base

    def backup_other(self, tag: str, path: str, load: Callable[[], None]) -> None:
        """Keep the model in `path`, adapters off, under `tag`.

        Where `path` is the base's folder nothing is loaded. Else the live base becomes what `load` fills it with:
        `restore` another tag afterwards.
        """
        self._adapters.backup(tag)
        for name, tensor in self._adapters.get(tag).items():
            if name.endswith(".lora_B"):
                tensor.zero_()
        self._base_of[tag] = BASE
        if is_base(self._args, path):
            return
        if BASE not in self._bases.tags:
            self._bases.backup(BASE)
        load()
        self._live_base = self._base_of[tag] = tag
        self._bases.backup(tag)

    def restore(self, tag: str) -> None:
        """Copy the policy under `tag` into the live model."""
        self._adapters.restore(tag)
        if self._base_of[tag] != self._live_base:
            self._live_base = self._base_of[tag]
            self._bases.restore(self._live_base)

    def copy(self, source_tag: str, target_tag: str) -> None:
        """Make `target_tag` hold what `source_tag` holds."""
        self._adapters.copy(source_tag, target_tag)
        self._base_of[target_tag] = self._base_of[source_tag]

    def get(self, tag: str) -> Mapping[str, Tensor]:
        """Base weights and adapters of `tag` by name. Don't change them."""
        base = self._base_of[tag]
        weights = self._bases.get(base) if base in self._bases.tags else dict(self._bases.source())
        return ChainMap(dict(self._adapters.get(tag)), dict(weights))


def is_base(args: argparse.Namespace, path: str | Path) -> bool:
    """Whether `path` is the folder of the adapters' base."""
    return os.path.realpath(path) == os.path.realpath(args.hf_checkpoint)
