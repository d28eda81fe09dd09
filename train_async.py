"""Asynchronous training, one step off-policy: the next rollout is generated while the trainers learn from the last."""

from __future__ import annotations

from argparse import Namespace

from slime.observability.logging_utils import configure_logger, tracking
from slime.ray.cluster import cluster
from slime.ray.models import create_training_models, rollout_manager, save_data_state, save_models, send_weights
from slime.ray.placement_group import create_placement_groups
from slime.ray.restarts import supervise
from slime.utils.arguments import parse_args
from slime.utils.misc import should_run_periodic_action


def train(args: Namespace) -> None:
    pgs = create_placement_groups(args)
    with rollout_manager(args, pgs["rollout"]) as manager:
        actor = create_training_models(args, pgs, manager)
        per_epoch = args.num_rollout_per_epoch
        last = args.num_rollout - 1
        if args.num_rollout == 0 and args.eval_interval is not None:
            manager.eval(0)
        if args.start_rollout_id == 0 <= last and args.eval_interval is not None and not args.skip_eval_before_train:
            manager.eval(0)

        if args.start_rollout_id <= last:
            manager.start_generate(args.start_rollout_id)
        for rollout_id in range(args.start_rollout_id, args.num_rollout):
            data = manager.generated(rollout_id)
            saves = should_run_periodic_action(rollout_id, args.save_interval, per_epoch, args.num_rollout)
            if saves and actor is not None:
                save_data_state(args, rollout_id, manager)  # before the next rollout takes prompts
            if rollout_id < last:
                manager.start_generate(rollout_id + 1)

            if actor is not None:
                actor.train(rollout_id, data)
                if saves:
                    save_models(args, rollout_id, actor)
                if not args.offload_train:
                    actor.clear_memory()
                if should_run_periodic_action(rollout_id, args.update_weights_interval, num_rollout=args.num_rollout):
                    if rollout_id < last and not manager.keeps_generating():
                        manager.generated(rollout_id + 1)
                    send_weights(args, actor, manager)

            if should_run_periodic_action(rollout_id, args.eval_interval, per_epoch, args.num_rollout):
                manager.eval(rollout_id)


def main() -> None:
    args = parse_args(rollouts_ahead=1)
    configure_logger(args, "driver")
    supervise(args)
    with cluster(args), tracking(args):
        train(args)


if __name__ == "__main__":
    main()
