"""Base of the actors that train: one per device, one rank of the trainers' process group."""

from __future__ import annotations

import abc
import os
from argparse import Namespace
from typing import Any

from slime.ray.ray_actor import RayActor
from slime.utils import accelerator


def get_local_device_id() -> int:
    """Index in this process of the device that Ray gave this actor; 0 where devices have no ids."""
    current = accelerator.current()
    ids = current.assigned_device_ids()
    return current.local_index(ids[0]) if ids else 0


class TrainRayActor(RayActor, abc.ABC):
    """One rank. It is created first, so that the process starts and loads its libraries while the engines start, and
    initialised when the engines have made room on the device."""

    def __init__(
        self, world_size: int, rank: int, master_addr: str | None = None, master_port: int | None = None
    ) -> None:
        self._world_size = world_size
        self._rank = rank
        if master_addr is None or master_port is None:
            master_addr, master_port = self.get_master_addr_and_port()
        self.master_addr, self.master_port = master_addr, master_port

    def master_address(self) -> tuple[str, int]:
        """Where rank 0 of the process group listens."""
        return self.master_addr, self.master_port

    def preload(self) -> None:
        """Import what `init` will need; called while the engines start."""

    def init(self, args: Namespace, role: str, with_ref: bool = False, with_opd_teacher: bool = False) -> int:
        """Take the device and join the process group. Subclasses build the model and return the first rollout id."""
        from slime.backends.megatron_utils.initialize import init_process_group
        from slime.observability.logging_utils import configure_logger

        self.args = args
        self.role = role
        configure_logger(args, f"{role}-{self._rank}")
        os.environ.update(
            MASTER_ADDR=self.master_addr,
            MASTER_PORT=str(self.master_port),
            WORLD_SIZE=str(self._world_size),
            RANK=str(self._rank),
            LOCAL_RANK=str(get_local_device_id()),
        )
        accelerator.current().set_device(get_local_device_id())
        init_process_group(args, self._rank, self._world_size, self.master_addr, self.master_port)
        return 0

    @abc.abstractmethod
    def train(self, rollout_id: int, rollout_data_ref: list[Any], external_data: Any = None) -> dict[str, Any]: ...

    @abc.abstractmethod
    def save_model(self, rollout_id: int, force_sync: bool = False) -> None: ...

    @abc.abstractmethod
    def update_weights(self) -> None: ...

    @abc.abstractmethod
    def sleep(self) -> None: ...

    @abc.abstractmethod
    def wake_up(self) -> None: ...

    @abc.abstractmethod
    def clear_memory(self) -> None: ...

    @abc.abstractmethod
    def set_rollout_manager(self, rollout_manager: Any) -> None: ...
