"""Mixture-of-experts settings: what routing replay needs, and what megatron-core 0.16.1 would silently do wrong."""

from __future__ import annotations

from typing import Any

from slime.utils.arguments.rules.context import Context


def resolve_experts(context: Context) -> None:
    """Megatron's switch for replay follows slime's."""
    if context.args.use_routing_replay:
        context.force("moe_enable_routing_replay", True, _replay_flag(context))


def check_experts(context: Context) -> None:
    """Combinations that have no meaning, or that would be ignored without a word."""
    args = context.args
    if args.num_experts is not None:
        _check_router_losses(context)
    if args.use_routing_replay:
        _check_replay(context)
    elif args.moe_enable_routing_replay:
        context.problems.add(
            f"{context.name('moe_enable_routing_replay')} alone replays nothing: use --use-routing-replay or "
            "--use-rollout-routing-replay"
        )


def _replay_flag(context: Context) -> str:
    by_engine = context.args.use_rollout_routing_replay
    return context.name("use_rollout_routing_replay" if by_engine else "use_routing_replay")


def _check_replay(context: Context) -> None:
    args, name = context.args, _replay_flag(context)
    context.require(args.num_experts is not None, f"{name} needs a model with experts")
    context.require(not args.moe_router_fusion, f"{name}: the fused router of --moe-router-fusion can't replay")
    context.require(
        "sinkhorn" not in args.moe_router_load_balancing_type,
        f"{name}: --moe-router-load-balancing-type sinkhorn can't replay",
    )
    context.require(
        args.use_rollout_routing_replay or args.compute_advantages_and_returns,
        f"{name} replays the own log-prob pass, but without advantages there is no such pass",
    )


def _check_router_losses(context: Context) -> None:
    """The auxiliary losses whose gradient would depend on the layout, and what fails with padding."""
    args = context.args
    kinds, coefficients = _as_list(args.moe_router_load_balancing_type), _as_list(args.moe_aux_loss_coeff)
    used = [kind for kind, coefficient in zip(kinds, coefficients, strict=False) if coefficient]
    flag = context.name("moe_router_load_balancing_type")
    context.require(
        "global_aux_loss" not in used,
        f"{flag} global_aux_loss: in megatron-core 0.16.1 its gradient shrinks with the number of data-parallel "
        "ranks; use aux_loss or seq_aux_loss",
    )
    if args.calculate_per_token_loss:
        for dest, value in (("moe_aux_loss_coeff", any(used)), ("moe_z_loss_coeff", args.moe_z_loss_coeff)):
            context.require(
                not value,
                f"{context.name(dest)} and {context.name('calculate_per_token_loss')}: megatron-core 0.16.1 would "
                "scale the router's loss by all tokens over loss tokens, and by tensor parallel size",
            )
    context.require(
        args.moe_router_score_function == "sigmoid" or not args.moe_router_enable_expert_bias,
        f"{context.name('moe_router_enable_expert_bias')} needs --moe-router-score-function sigmoid",
    )


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]
