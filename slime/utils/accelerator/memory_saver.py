"""Seam for taking a trainer's memory off its device while engines use it, and giving it back bit-equal."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any


class MemorySaver(abc.ABC):
    """Between `pause` and `resume` the tensors keep their identity but must not be read or written.

    A device may answer an access with an illegal-address error, the CPU ends the process by a signal.
    """

    @contextlib.contextmanager
    def region(self, tag: str = "default") -> Iterator[None]:
        """Memory allocated inside can be paused, where a device needs to know that beforehand."""
        yield

    @contextlib.contextmanager
    def disable(self) -> Iterator[None]:
        """Memory allocated inside is not paused."""
        yield

    @property
    @abc.abstractmethod
    def paused(self) -> bool:
        """Whether the memory is off the device now."""

    @abc.abstractmethod
    def pause(self, model_chunks: Sequence[Any], optimizer: Any = None) -> int:
        """Take weights, gradients and optimizer state off the device.

        Args:
            model_chunks: Megatron `DistributedDataParallel` chunks, or plain modules.
            optimizer: a Megatron optimizer, a torch optimizer, or None.

        Returns:
            Bytes freed on the device.

        Raises:
            RuntimeError: paused already.
        """

    @abc.abstractmethod
    def resume(self) -> int:
        """Bring everything back; bytes restored.

        Raises:
            RuntimeError: not paused.
        """
