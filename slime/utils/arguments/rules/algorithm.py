"""What the loss and its parts need from each other."""

from __future__ import annotations

import difflib

from slime.utils.arguments.errors import ConfigError
from slime.utils.arguments.roles import check_role_args, parse_megatron_role_args, roles_with_entries
from slime.utils.arguments.rules.context import Context
from slime.utils.arguments.rules.loading import is_hf_checkpoint, is_megatron_checkpoint

GROUP_RELATIVE = ("grpo", "gspo", "cispo", "rloo")
MIS_FUNCTION = "slime.backends.megatron_utils.loss.mis_function"
MIS_SETTINGS = (
    "tis_level", "tis_mode", "tis_lower_bound", "tis_upper_bound", "tis_batch_normalize",
    "use_rs", "rs_level", "rs_lower_bound", "rs_upper_bound", "rs_veto_threshold",
)  # fmt: skip


def resolve_algorithm(context: Context) -> None:
    """Defaults that follow from other settings of the algorithm."""
    args = context.args
    context.fill_none("eps_clip_high", args.eps_clip)
    context.fill_none("eval_reward_key", args.reward_key)
    context.fill_none("eval_function_path", args.rollout_function_path)
    args.use_critic = args.advantage_estimator == "ppo" and args.num_rollout != 0
    args.rollouts_ahead = getattr(args, "rollouts_ahead", 0)  # the driver says it
    args.critic_num_nodes = args.actor_num_nodes
    args.critic_num_gpus_per_node = args.actor_num_gpus_per_node
    if args.n_samples_per_prompt == 1:
        context.fill("grpo_std_normalization", False)  # the deviation of one sample is 0
    if args.use_rollout_routing_replay:
        context.force("use_routing_replay", True, context.name("use_rollout_routing_replay"))
    if args.loss_type == "sft_loss":
        context.force("compute_advantages_and_returns", False, context.shown("loss_type"))


def _check_rewards(context: Context) -> None:
    from slime.rollout.rm_hub import rm_types

    args, known = context.args, rm_types()
    places = [("--rm-type", args.rm_type)]
    places += [(f"evaluation data set {config.name!r}: rm_type", config.rm_type) for config in args.eval_datasets]
    for where, rm_type in places:
        name = (rm_type or "").removeprefix("boxed_")
        if name and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            context.problems.add(f"{where} {rm_type!r} is none of {', '.join(known)}{hint}")
        if name == "remote_rm":
            context.require(args.rm_url, f"{where} remote_rm needs --rm-url")
    context.require(args.rm_timeout > 0, f"{context.shown('rm_timeout')} must be more than 0 seconds")


def check_algorithm(context: Context) -> None:
    """Combinations without meaning."""
    args = context.args
    _check_rewards(context)
    context.exclusive("kl_coef", "kl_loss_coef")
    context.exclusive("use_rollout_logprobs", "use_tis")
    context.exclusive("use_rollout_logprobs", "use_rs")
    context.exclusive("use_rollout_logprobs", "keep_old_actor")
    context.exclusive("constant_loss_denominator", "calculate_per_token_loss")
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
    _check_optimizer(context)
    _check_estimator(context)
    _check_mismatch(context)
    _check_distillation(context)
    _check_roles(context)


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


def _check_optimizer(context: Context) -> None:
    """Adam without moments has nothing to save, offload or store in another format."""
    args = context.args
    if not args.use_stateless_adam:
        return
    name = context.name("use_stateless_adam")
    context.require(args.optimizer == "adam", f"{name} needs --optimizer adam, not {args.optimizer}")
    for dest in ("optimizer_cpu_offload", "use_precision_aware_optimizer", "reset_optimizer_states"):
        context.exclusive("use_stateless_adam", dest)


def _check_estimator(context: Context) -> None:
    """Settings that an estimator reads, or doesn't."""
    args = context.args
    if args.advantage_estimator in GROUP_RELATIVE and args.custom_advantage_function_path is None:
        context.require(
            args.kl_coef == 0,
            f"{context.shown('kl_coef')} has no effect with --advantage-estimator {args.advantage_estimator}: "
            "use --use-kl-loss with --kl-loss-coef",
        )
    if args.advantage_estimator == "rloo":
        context.require(
            args.n_samples_per_prompt > 1,
            "--advantage-estimator rloo compares the samples of a prompt: --n-samples-per-prompt must be above 1",
        )
    context.require(0 <= args.gamma <= 1, f"{context.shown('gamma')} must be in [0, 1]")
    context.require(0 <= args.lambd <= 1, f"{context.shown('lambd')} must be in [0, 1]")
    context.require(args.value_clip > 0, f"{context.shown('value_clip')} must be above 0")
    context.require(args.num_critic_only_steps >= 0, f"{context.shown('num_critic_only_steps')} is negative")
    if args.advantage_estimator != "ppo":
        for dest in ("num_critic_only_steps", "value_clip", "lambd"):
            context.require(
                getattr(args, dest) == context.table.by_dest[dest].default,
                f"{context.shown(dest)} needs --advantage-estimator ppo",
            )


def _check_mismatch(context: Context) -> None:
    """Importance weights between trainer and engine."""
    args = context.args
    own = args.custom_tis_function_path is not None
    for dest in MIS_SETTINGS:
        context.require(
            own or getattr(args, dest) == context.table.by_dest[dest].default,
            f"{context.shown(dest)} needs --custom-tis-function-path {MIS_FUNCTION}",
        )
    context.needs("tis_batch_normalize", "use_tis")
    context.needs("rs_veto_threshold", "use_rs")
    _check_bounds(context, "tis_lower_bound", "tis_upper_bound")
    if args.rs_upper_bound is not None:
        _check_bounds(context, "rs_lower_bound", "rs_upper_bound")
    context.require(
        args.rs_veto_threshold is None or 0 < args.rs_veto_threshold < 1,
        f"{context.shown('rs_veto_threshold')} must be in (0, 1)",
    )


def _check_bounds(context: Context, lower: str, upper: str) -> None:
    low, high = getattr(context.args, lower), getattr(context.args, upper)
    context.require(high > 0, f"{context.shown(upper)} must be above 0")
    context.require(low is None or 0 <= low < high, f"{context.shown(lower)} must be in [0, {high})")


def _check_roles(context: Context) -> None:
    """The YAML file of settings per role."""
    args = context.args
    if args.megatron_config_path is None:
        return
    try:
        roles = roles_with_entries(args.megatron_config_path)
        for role in roles:
            check_role_args(args, parse_megatron_role_args(args, args.megatron_config_path, role), role)
    except ConfigError as error:
        context.problems.found += error.problems
        return
    if "critic" in roles and args.advantage_estimator != "ppo":
        context.problems.add(
            f"{args.megatron_config_path} has settings of a critic; --advantage-estimator ppo has one"
        )


def _check_distillation(context: Context) -> None:
    args = context.args
    if not args.use_opd:
        context.require(args.opd_teacher_load is None, f"{context.name('opd_teacher_load')} needs --use-opd")
        return
    context.require(args.opd_type is not None, "--use-opd needs --opd-type")
    context.require(args.compute_advantages_and_returns, "--use-opd works on advantages, which are switched off")
    context.require(
        args.custom_advantage_function_path is None,
        "--use-opd and --custom-advantage-function-path exclude each other: the function sets the advantages",
    )
    if args.opd_type == "megatron":
        context.require(
            is_megatron_checkpoint(args.opd_teacher_load) or is_hf_checkpoint(args.opd_teacher_load),
            "--opd-type megatron needs --opd-teacher-load, a Megatron checkpoint or a Hugging Face folder",
        )
    if args.opd_type == "sglang":
        context.require(args.opd_teacher_load is None, "--opd-type sglang excludes --opd-teacher-load")
        if args.rollout_temperature != 1:
            context.notice(
                "SGLang 0.5.23 scores given tokens at temperature 1 whatever the request says, while the student's "
                "log-probs are at --rollout-temperature %g: use 1, or --opd-type megatron",
                args.rollout_temperature,
            )
