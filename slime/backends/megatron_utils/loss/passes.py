"""Which forward passes a rollout's training needs."""

from __future__ import annotations

from argparse import Namespace


def can_skip_own_log_probs(args: Namespace, num_steps: int) -> bool:
    """Whether the pass that computes the actor's own log-probs before training would change nothing.

    With engine log-probs as pi_old nobody reads them. With one optimiser step per rollout pi_old is the policy that
    the step differentiates, so the training pass's own log-probs, detached, are the same numbers.

    Args:
        num_steps: optimiser steps in the rollout.
    """
    if args.use_routing_replay and not args.use_rollout_routing_replay:
        return False  # the pass records the experts
    if args.get_mismatch_metrics or args.use_rollout_entropy or args.tis_batch_normalize:
        return False
    if args.use_rollout_logprobs:
        return True
    if num_steps > 1 or args.loss_type != "policy_loss":
        return False
    shapes_advantages = args.kl_coef != 0 or args.use_opd or args.custom_advantage_function_path
    return not (shapes_advantages or args.keep_old_actor or args.advantage_estimator == "gspo")
