"""Which models are served, and by which groups of engines."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from typing import Any

WORKER_TYPES = ("regular", "prefill", "decode", "encoder", "placeholder")
ACTOR = "actor"  # name of the only model where none are named


@dataclasses.dataclass(frozen=True)
class ServerGroupConfig:
    """Engines of one kind and size.

    Attributes:
        num_gpus: devices of all its engines together; those of a placeholder stay free.
        overrides: `ServerArgs` fields for this group.
    """

    num_gpus: int
    num_gpus_per_engine: int
    worker_type: str = "regular"
    overrides: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.worker_type not in WORKER_TYPES:
            raise ValueError(f"worker_type {self.worker_type!r} is not one of {', '.join(WORKER_TYPES)}")
        if self.num_gpus <= 0 or self.num_gpus_per_engine <= 0:
            raise ValueError(f"num_gpus {self.num_gpus}, num_gpus_per_engine {self.num_gpus_per_engine}: not above 0")
        if self.worker_type != "placeholder" and self.num_gpus % self.num_gpus_per_engine:
            raise ValueError(
                f"a group of {self.num_gpus} devices can't be divided into engines of {self.num_gpus_per_engine}"
            )

    @property
    def num_engines(self) -> int:
        return 0 if self.worker_type == "placeholder" else self.num_gpus // self.num_gpus_per_engine


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

    def __post_init__(self) -> None:
        kinds = {group.worker_type for group in self.server_groups}
        if ("prefill" in kinds) != ("decode" in kinds):
            have, lack = ("prefill", "decode") if "prefill" in kinds else ("decode", "prefill")
            raise ValueError(f"model {self.name!r} has {have} engines but no {lack} engines")
        if "prefill" in kinds and "regular" in kinds:
            raise ValueError(f"model {self.name!r} has regular engines beside prefill and decode engines")
        if "encoder" in kinds and not kinds & {"regular", "prefill"}:
            raise ValueError(f"model {self.name!r} has encoder engines, but none that encoders could send to")

    @property
    def total_num_gpus(self) -> int:
        return sum(group.num_gpus for group in self.server_groups)

    @property
    def num_engines(self) -> int:
        """Engines that requests go to."""
        return sum(group.num_engines for group in self.server_groups if group.worker_type != "encoder")

    @property
    def has_pd_disaggregation(self) -> bool:
        return any(group.worker_type in ("prefill", "decode") for group in self.server_groups)

    @property
    def has_encoder_disaggregation(self) -> bool:
        return any(group.worker_type == "encoder" for group in self.server_groups)


@dataclasses.dataclass(frozen=True)
class SglangConfig:
    """The whole deployment; groups take consecutive devices in this order.

    Raises:
        ValueError: two models have one name, or trained weights would go to several.
    """

    models: tuple[ModelConfig, ...]

    def __post_init__(self) -> None:
        names = [model.name for model in self.models]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{names.count(name)} models are named {name!r}")
        trained = [model.name for model in self.models if model.update_weights]
        if len(trained) > 1:
            raise ValueError(
                f"models {' and '.join(trained)} would all receive the trained weights, which go to one model: "
                "set update_weights: false for the others"
            )

    @staticmethod
    def from_args(args: Namespace) -> SglangConfig:
        """The deployment that the flags describe: that of --sglang-config or --prefill-num-servers, else the actor's
        model on all rollout devices (none when there are 0).

        Raises:
            ValueError: what is wrong with it.
        """
        resolved: SglangConfig | None = getattr(args, "rollout_deployment", None)  # when the arguments were parsed
        if resolved is not None:
            return resolved
        if getattr(args, "sglang_config", None):
            from slime.backends.sglang_utils.sglang_yaml import read_sglang_yaml

            return read_sglang_yaml(args)
        if getattr(args, "prefill_num_servers", None):
            return SglangConfig.from_prefill_num_servers(args)
        groups: tuple[ServerGroupConfig, ...] = ()
        if args.rollout_num_gpus:
            groups = (ServerGroupConfig(args.rollout_num_gpus, args.rollout_num_gpus_per_engine),)
        return SglangConfig((ModelConfig(ACTOR, args.hf_checkpoint, groups),))

    @staticmethod
    def from_prefill_num_servers(args: Namespace) -> SglangConfig:
        """The first --prefill-num-servers engines prefill, the rest decode.

        Raises:
            ValueError: none are left to decode.
        """
        size, prefill = args.rollout_num_gpus_per_engine, args.prefill_num_servers * args.rollout_num_gpus_per_engine
        decode = (args.rollout_num_gpus or 0) - prefill
        if decode <= 0:
            raise ValueError(
                f"--prefill-num-servers {args.prefill_num_servers} x --rollout-num-gpus-per-engine {size} leaves none "
                f"of --rollout-num-gpus {args.rollout_num_gpus} to decode"
            )
        groups = (ServerGroupConfig(prefill, size, "prefill"), ServerGroupConfig(decode, size, "decode"))
        return SglangConfig((ModelConfig(ACTOR, args.hf_checkpoint, groups),))

    @property
    def main_model(self) -> ModelConfig:
        """The model that the default rollout samples from: the trained one, else the first."""
        return next((model for model in self.models if model.update_weights), self.models[0])

    @property
    def has_pd_disaggregation(self) -> bool:
        return any(model.has_pd_disaggregation for model in self.models)

    @property
    def total_num_gpus(self) -> int:
        return sum(model.total_num_gpus for model in self.models)
