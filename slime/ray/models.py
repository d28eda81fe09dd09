"""What both drivers do with the rollout manager and the training models: create, end, save, send weights."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from slime.backends.megatron_utils.update_weight.errors import WeightUpdateError
from slime.ray.actor_critic import ActorCriticGroup
from slime.ray.actor_group import RayTrainGroup
from slime.ray.cluster import MANAGER_CPUS
from slime.ray.failures import summary
from slime.ray.manager_client import ManagerClient
from slime.ray.placement_group import Placement
from slime.ray.train_actor import TrainRayActor

logger = logging.getLogger(__name__)

TrainGroup = RayTrainGroup | ActorCriticGroup

DISPOSE_TIMEOUT_S = 30
UPDATE_ATTEMPTS = 3


@contextmanager
def rollout_manager(args: Namespace, pg: Placement) -> Iterator[ManagerClient]:
    """The rollout manager for the length of a run.

    It starts the engines; its methods wait until they are ready. When the run succeeds it stops them; when the run
    fails it is killed at once, and its engines' processes end with it.
    """
    from slime.ray.engine_control import CONCURRENCY_GROUPS
    from slime.ray.rollout import RolloutManager

    actor_class = ray.remote(num_cpus=MANAGER_CPUS, concurrency_groups=CONCURRENCY_GROUPS)(RolloutManager)
    handle = actor_class.remote(args, pg)
    try:
        yield ManagerClient(handle, handle.start.remote(), args.use_fault_tolerance and not args.debug_train_only)
        ray.get(handle.dispose.remote(), timeout=DISPOSE_TIMEOUT_S)
    finally:
        ray.kill(handle)


def allocate_train_group(
    args: Namespace,
    num_nodes: int,
    num_gpus_per_node: int,
    pg: Placement,
    role: str = "actor",
    with_ref: bool = False,
    with_opd_teacher: bool = False,
    actor_cls: type[TrainRayActor] | None = None,
) -> RayTrainGroup:
    """Start the processes of a training group on the first bundles of `pg`."""
    return RayTrainGroup(
        args, num_nodes, num_gpus_per_node, pg,
        role=role, with_ref=with_ref, with_opd_teacher=with_opd_teacher, actor_cls=actor_cls,
    )  # fmt: skip


def create_training_models(
    args: Namespace,
    pgs: dict[str, Placement],
    manager: ManagerClient,
    actor_cls: type[TrainRayActor] | None = None,
) -> TrainGroup | None:
    """Build the actor (with PPO also the critic), load data state and send the first weights. None with
    --debug-rollout-only.

    Sets `args.num_rollout`, `args.num_rollout_per_epoch` and `args.start_rollout_id` where they follow from data and
    checkpoint.
    """
    actor = None if args.debug_rollout_only else start_train_group(args, pgs, actor_cls)
    _resolve_num_rollout(args, manager.get_num_rollout_per_epoch())
    if args.check_weight_update_equal:
        manager.check_weights("snapshot")
        manager.check_weights("reset_tensors")
    if args.offload_rollout:
        manager.offload()
    if actor is not None:
        start_ids = set(actor.create(manager.handle))
        if len(start_ids) != 1:
            raise RuntimeError(f"the actor's ranks would start from different rollouts: {sorted(start_ids)}")
        if args.start_rollout_id is None or (args.use_critic and "start_rollout_id" not in args.set_by_user):
            args.start_rollout_id = start_ids.pop()
    args.start_rollout_id = args.start_rollout_id or 0
    if args.rollout_global_dataset:
        manager.load(args.start_rollout_id - 1)
    if actor is not None:
        send_weights(args, actor, manager)
        manager.on_lost_engines = lambda: send_weights(args, actor, manager)
        if args.check_weight_update_equal:
            manager.check_weights("compare")
    return actor


def start_train_group(args: Namespace, pgs: dict[str, Placement], actor_cls: type[TrainRayActor] | None) -> TrainGroup:
    nodes, per_node = args.actor_num_nodes, args.actor_num_gpus_per_node
    actor = allocate_train_group(
        args, nodes, per_node, pgs["actor"],
        with_ref=args.kl_coef != 0 or args.use_kl_loss,
        with_opd_teacher=args.use_opd and args.opd_type == "megatron",
        actor_cls=actor_cls,
    )  # fmt: skip
    if not args.use_critic:
        return actor
    critic = allocate_train_group(args, nodes, per_node, pgs["critic"], role="critic", actor_cls=actor_cls)
    return ActorCriticGroup(args, actor, critic)


def _resolve_num_rollout(args: Namespace, per_epoch: int | None) -> None:
    """Without --num-rollout it follows from --num-epoch and the data; only then do epochs have ends."""
    args.num_rollout_per_epoch = None
    if args.num_rollout is not None:
        return
    if per_epoch is None:
        raise ValueError(
            f"--num-epoch {args.num_epoch} needs a data source that has a length; else give --num-rollout"
        )
    if not per_epoch:
        raise ValueError(
            f"--num-epoch {args.num_epoch}: the prompt set has fewer prompts than "
            f"--rollout-batch-size {args.rollout_batch_size}"
        )
    args.num_rollout_per_epoch = per_epoch
    args.num_rollout = per_epoch * args.num_epoch
    logger.info("%d epochs of %d rollouts each: %d rollouts", args.num_epoch, per_epoch, args.num_rollout)


def save(args: Namespace, rollout_id: int, actor: TrainGroup, manager: ManagerClient) -> None:
    """Save data state and model after `rollout_id`.

    The data state comes first: a run that is killed in between resumes from the checkpoint before, not from weights
    whose place in the data is lost.
    """
    save_data_state(args, rollout_id, manager)
    save_models(args, rollout_id, actor)


def save_data_state(args: Namespace, rollout_id: int, manager: ManagerClient) -> None:
    """Save from where a run that resumes after `rollout_id` takes its prompts: call it before the next rollout."""
    if args.rollout_global_dataset:
        manager.save(rollout_id)


def save_models(args: Namespace, rollout_id: int, actor: TrainGroup) -> None:
    """Save the models after `rollout_id`; the last save waits until everything is on disk."""
    actor.save_model(rollout_id, force_sync=rollout_id == args.num_rollout - 1)


def send_weights(args: Namespace, actor: TrainGroup, manager: ManagerClient) -> None:
    """Bring the engines' weights back, replace them by the trainers', then bring the KV cache back.

    With --use-fault-tolerance engines that have failed are replaced first, and an update that fails because of an
    engine is made again without it.

    Raises:
        WeightUpdateError: not every engine has got all weights.
    """
    if args.use_fault_tolerance:
        with manager.replacing_engines():
            _replace_and_send(args, actor, manager)
    else:
        _send(args, actor, manager)


def _send(args: Namespace, actor: TrainGroup, manager: ManagerClient) -> None:
    if args.offload_rollout:
        manager.onload_weights()
    actor.update_weights()
    if args.offload_rollout:
        manager.onload_kv()


def _replace_and_send(args: Namespace, actor: TrainGroup, manager: ManagerClient) -> None:
    for left in reversed(range(UPDATE_ATTEMPTS)):
        manager.recover_updatable_engines()
        try:
            _send(args, actor, manager)
        except WeightUpdateError as error:
            if not left:
                raise
            logger.error("the weights are sent again: %s", summary(error))
        else:
            break
    manager.health_monitoring_resume()
