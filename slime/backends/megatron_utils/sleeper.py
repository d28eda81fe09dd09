"""Taking a rank's model off its device between the calls that need it."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from slime.observability.timer import timer
from slime.utils import accelerator

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel as DDP

logger = logging.getLogger(__name__)


class Sleeper:
    """Knows whether this rank sleeps. Asleep, weights, gradients and optimiser state are off the device, and the
    process groups are gone."""

    def __init__(self, args: Namespace, model: list[DDP], optimizer: Any) -> None:
        self._offloads = args.offload_train
        self._model = model
        self._optimizer = optimizer
        self._memory_saver = accelerator.current().memory_saver()
        self._asleep = False

    def sleep(self) -> None:
        """Take everything off the device and destroy the process groups."""
        from slime.utils.memory_utils import clear_memory
        from slime.utils.reloadable_process_group import destroy_process_groups

        if self._asleep:
            return
        with timer("sleep"):
            clear_memory(clear_host_memory=True)
            destroy_process_groups()
            freed = self._memory_saver.pause(self._model, self._optimizer)
            accelerator.current().empty_cache()
        logger.info("asleep: %.1f MiB off the device", freed / 2**20)
        self._asleep = True

    def wake_up(self) -> None:
        """Bring everything back that `sleep` took."""
        from slime.utils.reloadable_process_group import reload_process_groups

        if not self._asleep:
            return
        with timer("wake_up"):
            self._memory_saver.resume()
            reload_process_groups()
        self._asleep = False

    def rest(self) -> None:
        """Go to sleep if training is offloaded (`args.offload_train`)."""
        if self._offloads:
            self.sleep()

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Awake for the block; asleep afterwards if training is offloaded."""
        self.wake_up()
        yield
        self.rest()

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Process groups for the block, but the model stays off the device: engines may be using it."""
        from slime.utils.reloadable_process_group import destroy_process_groups, reload_process_groups

        if self._asleep:
            reload_process_groups()
        with self._memory_saver.disable():
            yield
        if self._asleep:
            destroy_process_groups()
