"""Proof that an engine's tensors are the trainer's, bit for bit (--check-weight-update-equal; sglang 0.5.23).

SGLang fuses and shards what it loads, so its tensors can't be compared by name. Instead the trainer's weights
go to the engine a second time, by another way: as a checkpoint on disk, over tensors that were overwritten with
random values before. Checksums of every tensor must be the same after both ways. SGLang's own `compare` needs
CUDA, and takes the checkpoint that the server started from for the trainer's weights, which is wrong after a
resume.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

_SECONDS = 600.0


class WeightMismatch(RuntimeError):
    """Tensors of an engine differ from the trainer's; the message names them."""


Checksums = dict[str, str]


class WeightCheck:
    """The check on one engine.

    Args:
        request: sends a request to its server: (method, path, payload, timeout=seconds).
    """

    def __init__(self, request: Callable[..., Any]) -> None:
        self._request = request
        self._verified: Checksums | None = None

    def run(self, action: str) -> Any:
        """One of SGLang's actions, or `compare`: the weights must be those that were verified last.

        Raises:
            WeightMismatch: they differ, or none were verified since the last reset.
        """
        if action == "compare":
            return self._compare()
        if action == "reset_tensors":
            self._verified = None
        return self._checker(action)

    def verify(self, checkpoint: str) -> int:
        """Compare the loaded weights with the Hugging Face checkpoint folder; how many tensors are equal.

        Raises:
            WeightMismatch: naming the tensors that differ.
        """
        received = self.checksums()
        self._checker("reset_tensors")
        self._request("POST", "/update_weights_from_disk", {"model_path": checkpoint}, timeout=_SECONDS)
        loaded = self.checksums()
        _require_equal(received, loaded, "the engine's weights differ from the trainer's")
        self._verified = loaded
        return len(loaded)

    def checksums(self) -> Checksums:
        """A checksum for each tensor of each rank, by rank and name."""
        answer = self._checker("checksum")
        found = {
            f"rank {index}: {name}": checksum
            for index, rank in enumerate(answer["ranks"])
            for name, checksum in rank["checksums"].items()
        }
        if not found:
            raise WeightMismatch("SGLang's weights_checker returned no checksums (sglang 0.5.23)")
        return found

    def _compare(self) -> int:
        if self._verified is None:
            raise WeightMismatch("the engine's weights were not sent by the trainer since they were reset")
        _require_equal(self.checksums(), self._verified, "the engine's weights changed since they were verified")
        logger.info("%d tensors of the engine equal the trainer's bit for bit", len(self._verified))
        return len(self._verified)

    def _checker(self, action: str) -> Any:
        return self._request("POST", "/weights_checker", {"action": action}, timeout=_SECONDS)


def _require_equal(first: Checksums, second: Checksums, what: str) -> None:
    names = first.keys() | second.keys()
    different = sorted(name for name in names if first.get(name) != second.get(name))
    if different:
        shown = ", ".join(different[:10]) + (", ..." if len(different) > 10 else "")
        raise WeightMismatch(f"{what}: {len(different)} of {len(names)} tensors: {shown}")
