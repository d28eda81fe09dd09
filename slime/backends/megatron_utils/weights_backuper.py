"""Several sets of weights for one model: the actor's, the reference's, an older actor's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor


class WeightsBackuper:
    """Keeps named copies ("tags": `actor`, `ref`, `old_actor`, ...) of a model's weights in host memory.

    `source` returns the live weights of this rank as (name, tensor); names must not change between calls. Copies live
    in pinned memory where the device has it, and are reused by later backups under the same tag.
    """

    def __init__(self, source: Callable[[], Iterable[tuple[str, Tensor]]]) -> None:
        self.source = source
        self._copies: dict[str, dict[str, Tensor]] = {}

    @property
    def tags(self) -> tuple[str, ...]:
        return tuple(self._copies)

    @torch.no_grad()
    def backup(self, tag: str) -> None:
        """Copy the live weights under `tag`."""
        copy = self._copies.setdefault(tag, {})
        for name, weight in self.source():
            if name not in copy:
                copy[name] = torch.empty_like(weight, device="cpu", pin_memory=weight.device.type == "cuda")
            copy[name].copy_(weight.detach(), non_blocking=True)
        _synchronize()

    def backup_other(self, tag: str, path: str, load: Callable[[], None]) -> None:
        """Copy what `load` fills the model with, from `path`, under `tag`; the model holds that afterwards."""
        load()
        self.backup(tag)

    @torch.no_grad()
    def restore(self, tag: str) -> None:
        """Copy the weights under `tag` into the live model."""
        copy = self.get(tag)
        for name, weight in self.source():
            weight.data.copy_(copy[name], non_blocking=True)
        _synchronize()

    def get(self, tag: str) -> Mapping[str, Tensor]:
        """The weights under `tag` by name; KeyError lists the tags there are. Don't change them."""
        if tag not in self._copies:
            raise KeyError(f"no weights under the tag {tag!r}; there are {', '.join(self._copies) or 'none'}")
        return self._copies[tag]

    @torch.no_grad()
    def copy(self, source_tag: str, target_tag: str) -> None:
        """Make `target_tag` hold what `source_tag` holds."""
        source, target = self.get(source_tag), self._copies.setdefault(target_tag, {})
        for name, weight in source.items():
            if name not in target:
                target[name] = torch.empty_like(weight, pin_memory=weight.is_pinned())
            target[name].copy_(weight)


def _synchronize() -> None:
    from slime.utils.accelerator import current

    current().synchronize()
