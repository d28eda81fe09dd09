"""Which models are served, and by which groups of engines."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from typing import Any

WORKER_TYPES = ("regular", "prefill", "decode", "encoder", "placeholder")


@dataclasses.dataclass(frozen=True)
class ServerGroupConfig:
    """Engines of one kind and size.

    Attributes:
        num_gpus: devices of all its engines together.
        overrides: `ServerArgs` fields for this group.
    """

    num_gpus: int
    num_gpus_per_engine: int
    worker_type: str = "regular"
    overrides: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.worker_type not in WORKER_TYPES:
            raise ValueError(f"worker_type {self.worker_type!r} is not one of {', '.join(WORKER_TYPES)}")
        if self.num_gpus <= 0 or self.num_gpus % self.num_gpus_per_engine:
            raise ValueError(
                f"a group of {self.num_gpus} devices can't be divided into engines of {self.num_gpus_per_engine}"
            )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """One served model behind a router of its own.

    Attributes:
        update_weights: whether trained weights are sent to it.
    """

    name: str
    model_path: str
    server_groups: tuple[ServerGroupConfig, ...]
    update_weights: bool = True

    @property
    def total_num_gpus(self) -> int:
        return sum(group.num_gpus for group in self.server_groups)

    @property
    def has_pd_disaggregation(self) -> bool:
        return any(group.worker_type in ("prefill", "decode") for group in self.server_groups)


@dataclasses.dataclass(frozen=True)
class SglangConfig:
    """The whole deployment; groups take consecutive devices in this order."""

    models: tuple[ModelConfig, ...]

    @staticmethod
    def from_args(args: Namespace) -> SglangConfig:
        """The deployment that the flags describe: the actor's model on all rollout devices (none when there are 0)."""
        groups: tuple[ServerGroupConfig, ...] = ()
        if args.rollout_num_gpus:
            groups = (ServerGroupConfig(args.rollout_num_gpus, args.rollout_num_gpus_per_engine),)
        return SglangConfig((ModelConfig("actor", args.hf_checkpoint, groups),))

    @property
    def total_num_gpus(self) -> int:
        return sum(model.total_num_gpus for model in self.models)
