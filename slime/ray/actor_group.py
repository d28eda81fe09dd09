"""The group of training actors, driven as one."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slime.ray.placement_group import Placement
from slime.ray.train_actor import TrainRayActor
from slime.ray.utils import get_all
from slime.utils import accelerator
from slime.utils.arguments import parse_megatron_role_args

# A trainer and an engine share a device when colocated, so neither may ask for all of it.
TRAINER_DEVICE_FRACTION = 0.4


class RayTrainGroup:
    """Megatron actors, one per device, that hold one model.

    The constructor starts the processes; `create` builds the models in them.

    Args:
        pg: bundles in device order; the group takes the first `num_nodes * num_gpus_per_node`.
        num_gpus_per_actor: share of a bundle's device that each actor asks Ray for.
        role: "actor" or "critic".
        with_ref: also load the reference model.
        actor_cls: class to start in place of `MegatronTrainRayActor`.
    """

    def __init__(
        self,
        args: Namespace,
        num_nodes: int,
        num_gpus_per_node: int,
        pg: Placement,
        num_gpus_per_actor: float = TRAINER_DEVICE_FRACTION,
        role: str = "actor",
        with_ref: bool = False,
        with_opd_teacher: bool = False,
        actor_cls: type[TrainRayActor] | None = None,
    ) -> None:
        self.args = args
        self.role = role
        self._world_size = num_nodes * num_gpus_per_node
        self._with_ref = with_ref
        self._with_opd_teacher = with_opd_teacher
        self._actors = self._start(pg, num_gpus_per_actor, actor_cls)

    def _start(self, pg: Placement, fraction: float, actor_cls: type[TrainRayActor] | None) -> list[Any]:
        if actor_cls is None:
            from slime.backends.megatron_utils.actor import MegatronTrainRayActor as actor_cls

        current = accelerator.current()
        env = {**current.noset_visible_devices_env(), **current.trainer_env(self.args), **self.args.train_env_vars}
        remote_cls = ray.remote(actor_cls)

        def start(rank: int, *master: Any) -> Any:
            return remote_cls.options(
                **current.actor_options(fraction),
                runtime_env={"env_vars": env},
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    pg.pg, placement_group_bundle_index=pg.bundle_order[rank]
                ),
            ).remote(self._world_size, rank, *master)

        first = start(0)
        master = first.master_address.remote()
        first.preload.remote()
        if self._world_size == 1:
            return [first]
        addr, port = ray.get(master)
        others = [start(rank, addr, port) for rank in range(1, self._world_size)]
        for actor in others:
            actor.preload.remote()
        return [first, *others]

    def create(self, rollout_manager: Any = None) -> list[int]:
        """Build the model on every rank, with the settings of this role (`--megatron-config-path`); the rollout id
        from which each would go on."""
        args = parse_megatron_role_args(self.args, self.args.megatron_config_path, self.role)
        start_ids = get_all(
            [actor.init.remote(args, self.role, self._with_ref, self._with_opd_teacher) for actor in self._actors],
            what=f"initialising the {self.role}",
        )
        if rollout_manager is not None:
            self.set_rollout_manager(rollout_manager)
        return start_ids

    def async_train(
        self, rollout_id: int, rollout_data_ref: list[Any], external_data: Sequence[Any] | None = None
    ) -> list[ray.ObjectRef]:
        """Start training on the data of `rollout_id`; references to each rank's result."""
        extra = external_data if external_data is not None else [None] * len(self._actors)
        return [
            actor.train.remote(rollout_id, rollout_data_ref, own)
            for actor, own in zip(self._actors, extra, strict=True)
        ]

    def train(self, rollout_id: int, rollout_data_ref: list[Any]) -> dict[str, Any]:
        """Train and wait; the metrics of the step(s)."""
        results = get_all(self.async_train(rollout_id, rollout_data_ref), what=f"training on rollout {rollout_id}")
        return next((result for result in results if result), {})

    def save_model(self, rollout_id: int, force_sync: bool = False) -> None:
        self._call("save_model", rollout_id, force_sync)

    def update_weights(self) -> None:
        """Send the current weights to the engines."""
        self._call("update_weights")

    def onload(self) -> None:
        self._call("wake_up")

    def offload(self) -> None:
        self._call("sleep")

    def clear_memory(self) -> None:
        self._call("clear_memory")

    def set_rollout_manager(self, rollout_manager: Any) -> None:
        self._call("set_rollout_manager", rollout_manager)

    def _call(self, method: str, *method_args: Any) -> list[Any]:
        refs = [getattr(actor, method).remote(*method_args) for actor in self._actors]
        return get_all(refs, what=f"{self.role}.{method}")
