"""Low-rank adapters: what they are made of, and what contradicts a frozen base."""

from __future__ import annotations

from pathlib import Path

from slime.utils.arguments.groups.lora import ALL_LINEAR, EXPERTS
from slime.utils.arguments.rules.context import Context
from slime.utils.arguments.rules.loading import check_template, is_hf_checkpoint

_SETTINGS = ("lora_alpha", "lora_targets", "lora_load", "lora_save_adapter")
_OF_EXPERTS = {ALL_LINEAR, EXPERTS, "gate_proj", "up_proj", "down_proj", "gate_up_proj", "linear_fc1", "linear_fc2"}


def resolve_lora(context: Context) -> None:
    """Scale and targets that were not given."""
    args = context.args
    if args.lora_rank is None:
        return
    context.fill_none("lora_alpha", 2.0 * args.lora_rank)
    context.fill_none("lora_targets", [ALL_LINEAR])


def check_lora(context: Context) -> None:
    """Adapters need a rank, a folder for what is loaded, and nothing else that decides what trains."""
    args = context.args
    if args.lora_rank is None:
        for dest in _SETTINGS:
            context.require(getattr(args, dest) is None, f"{context.shown(dest)} needs --lora-rank")
        return
    context.require(args.lora_alpha > 0, f"{context.shown('lora_alpha')} must be above 0")
    for dest in ("only_train_params_name_list", "freeze_params_name_list"):
        context.require(
            not getattr(args, dest), f"{context.name(dest)} contradicts --lora-rank, with which only adapters train"
        )
    context.require(
        not (context.given("load") and args.resume_folder is None and is_hf_checkpoint(args.load)),
        f"{context.shown('load')} holds whole weights: with --lora-rank the base is --hf-checkpoint, and --load is a "
        "folder of adapter checkpoints",
    )
    if args.lora_load is not None:
        context.require(
            (Path(args.lora_load) / "adapter_config.json").is_file(),
            f"{context.shown('lora_load')}: no adapter_config.json there",
        )
    context.require(not args.enable_mtp_training, "--enable-mtp-training trains layers that --lora-rank freezes")
    context.needs("lora_save_adapter", "save_interval")
    check_template(context, "lora_save_adapter", {"rollout_id": 0})


def check_lora_layers(context: Context) -> None:
    """What the model's layers ask of adapters."""
    args = context.args
    if args.lora_rank is None:
        return
    if args.moe_router_enable_expert_bias:
        context.force("moe_router_bias_update_rate", 0.0, "--lora-rank (the router belongs to the frozen base)")
    context.require(
        not args.moe_shared_expert_overlap, "--moe-shared-expert-overlap runs linear layers in pieces: not with LoRA"
    )
    experts_adapted = args.num_experts and _OF_EXPERTS & set(args.lora_targets)
    size = args.expert_tensor_parallel_size if experts_adapted else 1
    context.require(
        args.lora_rank % size == 0,
        f"{context.shown('lora_rank')} must be a multiple of {context.shown('expert_tensor_parallel_size')}: "
        "the ranks of an expert share its adapters' rank",
    )
    context.require(
        EXPERTS not in args.lora_targets or args.num_experts,
        f"{context.shown('lora_targets')}: the model has no experts",
    )
