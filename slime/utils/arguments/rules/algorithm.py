"""What the loss and its parts need from each other."""

from __future__ import annotations

from slime.utils.arguments.rules.context import Context


def resolve_algorithm(context: Context) -> None:
    """Defaults that follow from other settings of the algorithm."""
    args = context.args
    context.fill_none("eps_clip_high", args.eps_clip)
    context.fill_none("eval_reward_key", args.reward_key)
    context.fill_none("eval_function_path", args.rollout_function_path)
    args.use_critic = args.advantage_estimator == "ppo"
    args.critic_num_nodes = args.actor_num_nodes
    args.critic_num_gpus_per_node = args.actor_num_gpus_per_node
    if args.n_samples_per_prompt == 1:
        context.fill("grpo_std_normalization", False)  # the deviation of one sample is 0
    if args.use_rollout_routing_replay:
        context.force("use_routing_replay", True, context.name("use_rollout_routing_replay"))
    if args.loss_type == "sft_loss":
        context.force("compute_advantages_and_returns", False, context.shown("loss_type"))


def check_algorithm(context: Context) -> None:
    """Combinations without meaning."""
    args = context.args
    context.exclusive("kl_coef", "kl_loss_coef")
    context.exclusive("use_rollout_logprobs", "use_tis")
    context.exclusive("only_train_params_name_list", "freeze_params_name_list")
    context.needs("enable_mtp_training", "mtp_num_layers")
    context.needs("kl_loss_coef", "use_kl_loss")
    if args.advantage_estimator.startswith("reinforce_plus_plus"):
        context.require(
            args.normalize_advantages, f"{context.shown('advantage_estimator')} needs --normalize-advantages"
        )
    if args.loss_type == "custom_loss":
        context.require(
            args.custom_loss_function_path, f"{context.shown('loss_type')} needs --custom-loss-function-path"
        )
    elif args.custom_loss_function_path is not None:
        context.problems.add(f"{context.name('custom_loss_function_path')} needs --loss-type custom_loss")
    if args.custom_advantage_function_path is not None and not args.compute_advantages_and_returns:
        context.problems.add(
            f"{context.name('custom_advantage_function_path')} and no advantages to compute contradict each other"
        )
    _check_ranges(context)
    _check_distillation(context)


def _check_ranges(context: Context) -> None:
    args = context.args
    temperature = args.rollout_temperature
    context.require(
        temperature > 0,
        f"{context.shown('rollout_temperature')} must be above 0: the trainer divides logits by it "
        "(for greedy evaluation: --eval-temperature 0)",
    )
    context.require(
        args.eval_temperature is None or args.eval_temperature >= 0, f"{context.shown('eval_temperature')} is negative"
    )
    context.require(0 < args.rollout_top_p <= 1, f"{context.shown('rollout_top_p')} must be in (0, 1]")
    context.require(args.eps_clip >= 0, f"{context.shown('eps_clip')} is negative")
    context.require(args.eps_clip_high >= 0, f"{context.shown('eps_clip_high')} is negative")
    context.require(args.eps_clip_c is None or args.eps_clip_c > 1, f"{context.shown('eps_clip_c')} must be above 1")
    context.require(args.tis_clip_low < args.tis_clip, "--tis-clip-low must be below --tis-clip")
    context.require(args.lr >= 0, f"{context.shown('lr')} is negative")
    if args.rollout_top_p != 1:
        context.problems.add(
            f"{context.shown('rollout_top_p')} is not supported yet: the trainer can't renormalise its log-probs "
            "over the nucleus without the engine's candidates"
        )


def _check_distillation(context: Context) -> None:
    args = context.args
    if not args.use_opd:
        context.require(args.opd_teacher_load is None, f"{context.name('opd_teacher_load')} needs --use-opd")
        return
    context.require(args.opd_type is not None, "--use-opd needs --opd-type")
    if args.opd_type == "megatron":
        context.require(args.opd_teacher_load, "--opd-type megatron needs --opd-teacher-load")
    if args.opd_type == "sglang":
        context.require(args.opd_teacher_load is None, "--opd-type sglang excludes --opd-teacher-load")
