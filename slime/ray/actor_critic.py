"""Actor and critic of PPO, driven as one training group."""

from __future__ import annotations

import logging
from argparse import Namespace
from typing import Any

import ray

from slime.ray.actor_group import RayTrainGroup
from slime.ray.utils import get_all

logger = logging.getLogger(__name__)


class ActorCriticGroup:
    """Two groups on the same devices that take turns: the critic trains first and hands its values to the actor.

    It has the methods of `RayTrainGroup` that the drivers call. In the first `args.num_critic_only_steps` rollouts
    only the critic trains, and only the critic is saved.
    """

    def __init__(self, args: Namespace, actor: RayTrainGroup, critic: RayTrainGroup) -> None:
        self.args = args
        self.actor = actor
        self.critic = critic

    def _actor_trains(self, rollout_id: int) -> bool:
        return rollout_id >= self.args.num_critic_only_steps

    def create(self, rollout_manager: Any = None) -> list[int]:
        """Build both models, one after the other; the rollout ids from which they would go on.

        Raises:
            RuntimeError: both were saved, at different rollouts.
        """
        actor_ids = self.actor.create(rollout_manager)
        critic_ids = self.critic.create()
        if set(critic_ids) == set(actor_ids):
            return actor_ids
        if set(critic_ids) == {0}:
            logger.warning("the actor goes on from a checkpoint; its critic has none and starts afresh")
            return actor_ids
        if set(actor_ids) == {0}:  # only the critic has trained so far
            return critic_ids
        raise RuntimeError(
            f"the actor would go on from rollout {sorted(set(actor_ids))}, the critic from {sorted(set(critic_ids))}"
        )

    def async_train(self, rollout_id: int, rollout_data_ref: list[Any]) -> list[ray.ObjectRef]:
        """Start training on the data of `rollout_id`; references to the results of each rank that trains last.

        Rank k of the actor starts when rank k of the critic, on the same device, has gone to sleep.
        """
        values = self.critic.async_train(rollout_id, rollout_data_ref)
        if not self._actor_trains(rollout_id):
            return values
        return self.actor.async_train(rollout_id, rollout_data_ref, external_data=values)

    def train(self, rollout_id: int, rollout_data_ref: list[Any]) -> dict[str, Any]:
        """Train and wait; the metrics of the actor's last step, if it trains."""
        results = get_all(self.async_train(rollout_id, rollout_data_ref), what=f"training on rollout {rollout_id}")
        return next((result for result in results if result), {}) if self._actor_trains(rollout_id) else {}

    def save_model(self, rollout_id: int, force_sync: bool = False) -> None:
        """Save the critic, then the actor if it has trained: a checkpoint of the actor always has a critic's."""
        self.critic.save_model(rollout_id, force_sync)
        if self._actor_trains(rollout_id):
            self.actor.save_model(rollout_id, force_sync)

    def update_weights(self) -> None:
        """Send the actor's current weights to the engines."""
        self.actor.update_weights()

    def clear_memory(self) -> None:
        self.actor.clear_memory()
        self.critic.clear_memory()

    def onload(self) -> None:
        """Wake the actor; the critic wakes up by itself when it trains or saves."""
        self.actor.onload()

    def offload(self) -> None:
        self.actor.offload()

    def set_rollout_manager(self, rollout_manager: Any) -> None:
        self.actor.set_rollout_manager(rollout_manager)
