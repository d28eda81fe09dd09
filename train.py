"""Synchronous training: roll out, train, send the weights to the engines, and again."""

from __future__ import annotations

from argparse import Namespace

from slime.observability.logging_utils import configure_logger, tracking
from slime.ray.cluster import cluster
from slime.ray.models import create_training_models, rollout_manager, save, send_weights
from slime.ray.placement_group import create_placement_groups
from slime.ray.restarts import supervise
from slime.utils.arguments import parse_args
from slime.utils.misc import should_run_periodic_action


def train(args: Namespace) -> None:
    pgs = create_placement_groups(args)
    with rollout_manager(args, pgs["rollout"]) as manager:
        actor = create_training_models(args, pgs, manager)
        per_epoch = args.num_rollout_per_epoch
        if args.num_rollout == 0 and args.eval_interval is not None:
            manager.eval(0)

        for rollout_id in range(args.start_rollout_id, args.num_rollout):
            if rollout_id == 0 and args.eval_interval is not None and not args.skip_eval_before_train:
                manager.eval(rollout_id)

            data = manager.generate(rollout_id)
            if actor is not None:
                if args.offload_rollout:
                    manager.offload()
                actor.train(rollout_id, data)
                if should_run_periodic_action(rollout_id, args.save_interval, per_epoch, args.num_rollout):
                    save(args, rollout_id, actor, manager)
                if not args.offload_train:
                    actor.clear_memory()
                send_weights(args, actor, manager)

            if should_run_periodic_action(rollout_id, args.eval_interval, per_epoch, args.num_rollout):
                manager.eval(rollout_id)


def main() -> None:
    args = parse_args()
    configure_logger(args, "driver")
    supervise(args)
    with cluster(args), tracking(args):
        train(args)


if __name__ == "__main__":
    main()
