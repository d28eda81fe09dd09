"""Which servers the run has: the models and groups of --sglang-config, engines that others run, the router."""

from __future__ import annotations

from slime.utils.arguments.errors import ConfigError
from slime.utils.arguments.rules.context import Context

SOURCES = ("prefill_num_servers", "sglang_config", "rollout_external_engine_addrs")


def resolve_external_engines(context: Context) -> None:
    """Ask the servers that others run what they are, and compare that with the settings."""
    args = context.args
    args.rollout_external = bool(args.rollout_external_engine_addrs)
    if not args.rollout_external or args.debug_train_only:
        return
    from slime.backends.sglang_utils.external import discover_external_engines, mismatches

    for dest in ("colocate", "offload_rollout"):
        context.exclusive("rollout_external_engine_addrs", dest)
    try:
        infos = discover_external_engines(
            args.rollout_external_engine_addrs, api_key=getattr(args, "sglang_api_key", None)
        )
    except ConfigError as error:
        context.problems.found += error.problems
        args.rollout_num_gpus = args.rollout_num_gpus or 0
        return
    context.problems.found += mismatches(args, infos)
    kinds = {info.worker_type for info in infos}
    for one, other in (("prefill", "decode"), ("decode", "prefill")):
        if one in kinds and other not in kinds:
            context.problems.add(
                f"{context.name('rollout_external_engine_addrs')}: {one} servers but no {other} servers"
            )
    args.rollout_external_engine_infos = infos
    context.force(
        "rollout_num_gpus", sum(info.num_gpus for info in infos), context.name("rollout_external_engine_addrs")
    )
    args.rollout_num_engines = len(infos)


def resolve_deployment(context: Context) -> None:
    """Read the deployment once, so that its errors show before anything starts and every node has it.

    Without --rollout-num-gpus, --sglang-config says how many devices the engines have.
    """
    args = context.args
    args.rollout_deployment = None
    for position, first in enumerate(SOURCES):
        for second in SOURCES[position + 1 :]:
            context.exclusive(first, second)
    if args.debug_train_only or not (args.sglang_config or args.prefill_num_servers):
        return
    from slime.backends.sglang_utils.sglang_config import SglangConfig

    if args.prefill_num_servers and args.rollout_num_gpus is None:
        return  # which is a problem that is reported elsewhere
    try:
        config = SglangConfig.from_args(args)
    except ConfigError as error:
        context.problems.found += error.problems
        args.rollout_num_gpus = args.rollout_num_gpus or 0
        return
    except ValueError as error:
        context.problems.add(str(error))
        return
    context.fill_none("rollout_num_gpus", config.total_num_gpus)
    args.rollout_deployment = config
    args.rollout_num_engines = config.main_model.num_engines


def check_deployment(context: Context) -> None:
    """The groups take all rollout devices, and one model gets the trained weights."""
    args = context.args
    config = args.rollout_deployment
    if config is not None and args.sglang_config:
        context.require(
            config.total_num_gpus == args.rollout_num_gpus,
            f"{context.shown('sglang_config')} places engines (and placeholders) on {config.total_num_gpus} devices, "
            f"but {context.shown('rollout_num_gpus')} says otherwise",
        )
        if not args.debug_rollout_only:
            context.require(
                any(model.update_weights for model in config.models),
                f"{context.shown('sglang_config')}: no model receives the trained weights: one must have the "
                f"model_path {args.hf_checkpoint} or update_weights: true",
            )
    if config is not None and any(model.has_encoder_disaggregation for model in config.models):
        context.exclusive("sglang_config", "use_fault_tolerance")  # engines know their encoders by address
        context.require(
            args.debug_rollout_only or not config.main_model.has_encoder_disaggregation,
            f"{context.shown('sglang_config')}: model {config.main_model.name!r} is trained and has encoder engines, "
            "to which SGLang 0.5.23 can send no weights",
        )
    _check_slime_router(context, config)


def _check_slime_router(context: Context, config: object) -> None:
    args = context.args
    if not args.use_slime_router:
        context.require(
            not args.slime_router_middleware_paths,
            f"{context.name('slime_router_middleware_paths')} needs --use-slime-router",
        )
        return
    context.exclusive("use_slime_router", "sglang_router_ip")
    if context.given("router_policy"):
        context.problems.add(
            f"{context.shown('router_policy')} is sglang-router's: --use-slime-router has one of its own"
        )
    infos = getattr(args, "rollout_external_engine_infos", ())
    if getattr(config, "has_pd_disaggregation", False) or any(info.is_pd_worker for info in infos):
        context.problems.add("--use-slime-router can't bring prefill and decode engines together: leave it out")
