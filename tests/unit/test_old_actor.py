"""`--keep-old-actor`: old log-probs come from the weights that sampled the rollout, in both drivers."""

from __future__ import annotations

import pytest

from slime.backends.megatron_utils.actor_training import SendLog


def versions_used(rollouts: int, interval: int, rollouts_ahead: int) -> tuple[list[int], list[int]]:
    """Per rollout (the version of the weights that sampled it, the version under the tag that is chosen), in the order
    of train.py (0 ahead) or train_async.py (1 ahead: a rollout begins before training on the one before it)."""
    log = SendLog(-1, -1)
    engine = actor = 0
    copies = {"rollout_actor": 0, "old_actor": 0}
    sampled = [engine] * (1 + rollouts_ahead)
    chosen = []
    for rollout_id in range(rollouts):
        chosen.append(copies[log.sampling_tag(rollout_id, rollouts_ahead)])
        actor, log.last_trained = actor + 1, rollout_id
        if (rollout_id + 1) % interval == 0:
            copies = {"rollout_actor": actor, "old_actor": copies["rollout_actor"]}
            log.note_sent()
            engine = actor
        sampled.append(engine)
    return sampled[:rollouts], chosen


@pytest.mark.parametrize("interval", [1, 2, 3])
@pytest.mark.parametrize("rollouts_ahead", [0, 1])
def test_the_weights_that_sampled_are_chosen(interval: int, rollouts_ahead: int) -> None:
    sampled, chosen = versions_used(9, interval, rollouts_ahead)
    assert chosen == sampled
    assert len(set(chosen)) > 2
