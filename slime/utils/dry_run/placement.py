"""Which bundle, and so which device, runs what."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """One bundle. `trainer` and `engine` are None where the bundle has none; a critic has the actor's ranks.

    Attributes:
        node, device: where it lies when nodes have `--num-gpus-per-node` devices.
        trainer: rank and coordinates, such as {"rank": 5, "tp": 1, "cp": 0, "dp": 2, "pp": 0}.
        engine: {"engine": index, "rank": which of the engine's devices}.
    """

    bundle: int
    node: int
    device: int
    trainer: dict[str, int] | None
    engine: dict[str, int] | None
    has_critic: bool = False


def plan_placement(args: Namespace) -> list[Device]:
    """All bundles in device order (sorted by node address and device index when the run starts)."""
    from slime.ray.placement_group import placement_group_layout

    total, offset = placement_group_layout(args)
    trainers = 0 if args.debug_rollout_only else args.actor_num_nodes * args.actor_num_gpus_per_node
    engines = [] if args.debug_train_only or args.rollout_external else _engine_parts(args)
    return [
        Device(
            bundle,
            node=bundle // args.num_gpus_per_node,
            device=bundle % args.num_gpus_per_node,
            trainer=rank_coordinates(args, bundle) if bundle < trainers else None,
            engine=engines[bundle - offset] if 0 <= bundle - offset < len(engines) else None,
            has_critic=args.use_critic and bundle < trainers,
        )
        for bundle in range(total)
    ]


def rank_coordinates(args: Namespace, rank: int) -> dict[str, int]:
    """Where a training rank stands in each parallel dimension, in megatron-core's order (TP fastest).

    Experts are laid out on their own: expert tensor parallel fastest, then expert parallel.
    """
    sizes = {"tp": args.tensor_model_parallel_size, "cp": args.context_parallel_size}
    data, stages = {"dp": args.data_parallel_size}, {"pp": args.pipeline_model_parallel_size}
    sizes |= stages | data if args.use_tp_pp_dp_mapping else data | stages
    coordinates = {"rank": rank}
    left = rank
    for name, size in sizes.items():
        left, coordinates[name] = divmod(left, size)
    if args.num_experts:
        coordinates["ep"] = rank // args.expert_tensor_parallel_size % args.expert_model_parallel_size
    return coordinates


def _engine_parts(args: Namespace) -> list[dict[str, int] | None]:
    """The engine on each rollout device; None on those of a placeholder."""
    from slime.backends.sglang_utils.sglang_config import SglangConfig

    parts: list[dict[str, int] | None] = []
    count = 0
    for model in SglangConfig.from_args(args).models:
        for group in model.server_groups:
            if group.worker_type == "placeholder":
                parts += [None] * group.num_gpus
                continue
            for _ in range(group.num_engines):
                parts += [{"engine": count, "rank": rank} for rank in range(group.num_gpus_per_engine)]
                count += 1
    return parts
