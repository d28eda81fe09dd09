"""Which devices train, which serve, and who goes to sleep."""

from __future__ import annotations

from slime.utils.arguments.rules.context import Context


def resolve_modes(context: Context) -> None:
    """The debugging modes and what they switch off."""
    args = context.args
    if args.load_debug_rollout_data is not None:
        context.force("debug_train_only", True, context.name("load_debug_rollout_data"))
    context.exclusive("debug_train_only", "debug_rollout_only")
    if args.debug_rollout_only:
        for dest in ("offload_train", "offload_rollout"):
            context.force(dest, False, context.name("debug_rollout_only"))


def resolve_devices(context: Context) -> None:
    """How many devices the engines get where the user left it open."""
    args = context.args
    actor = args.actor_num_nodes * args.actor_num_gpus_per_node
    if args.debug_train_only:
        context.fill_none("rollout_num_gpus", 0)
    elif (args.colocate or args.debug_rollout_only) and not args.sglang_config:  # which says how many it places
        context.fill_none("rollout_num_gpus", actor)
    if args.debug_rollout_only:
        args.colocate = False


def require_devices(context: Context) -> None:
    """Engines with devices of their own: how many, must have been said."""
    if context.args.rollout_num_gpus is None:
        context.problems.add("--rollout-num-gpus is needed: without --colocate, engines have devices of their own")


def resolve_offload(context: Context) -> None:
    """Colocated parts take turns on their devices, so both sleep unless told otherwise."""
    args = context.args
    if args.offload:
        for dest in ("offload_train", "offload_rollout"):
            context.force(dest, True, context.name("offload"))
    if args.colocate and not args.debug_train_only:
        context.fill_none("offload_train", True)
        context.fill_none("offload_rollout", True)
    if args.advantage_estimator == "ppo" and not args.debug_rollout_only and args.num_rollout != 0:
        context.force("offload_train", True, "--advantage-estimator ppo (actor and critic share their devices)")
    for dest in ("offload_train", "offload_rollout"):
        context.fill_none(dest, False)


def check_devices(context: Context) -> None:
    """Engines must fit on the devices they get."""
    args = context.args
    engine, devices = args.rollout_num_gpus_per_engine, args.rollout_num_gpus
    if devices is not None and not args.rollout_external and not args.debug_train_only:
        context.require(devices >= 0, f"{context.shown('rollout_num_gpus')} is negative")
        context.require(
            devices % engine == 0 or args.sglang_config,
            f"{context.shown('rollout_num_gpus')} is not a multiple of {context.shown('rollout_num_gpus_per_engine')}",
        )
    if engine > args.num_gpus_per_node and not args.debug_train_only:
        context.require(
            engine % args.num_gpus_per_node == 0,
            f"{context.shown('rollout_num_gpus_per_engine')} is more than a node and not a multiple of "
            f"{context.shown('num_gpus_per_node')}",
        )


def check_driver(context: Context) -> None:
    """What only one of the drivers can do."""
    args = context.args
    if args.rollouts_ahead == 0:
        context.require(
            args.update_weights_interval == 1,
            f"{context.shown('update_weights_interval')} needs train_async.py: train.py sends weights every rollout",
        )
        return
    for dest in ("colocate", "offload_rollout"):
        context.require(
            not getattr(args, dest),
            f"train_async.py generates while it trains: it can't be run with {context.name(dest)} "
            "(give the engines devices of their own with --rollout-num-gpus, or run train.py)",
        )
