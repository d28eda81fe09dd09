"""Where the first weights come from, and what is saved."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from slime.utils.arguments.errors import ConfigError
from slime.utils.arguments.rules.context import Context

TRACKER = "latest_checkpointed_iteration.txt"


def is_megatron_checkpoint(path: str | None) -> bool:
    return path is not None and (Path(path) / TRACKER).is_file()


def is_hf_checkpoint(path: str | None) -> bool:
    return path is not None and (Path(path) / "config.json").is_file()


def saved_iteration(path: str) -> int | None:
    """The newest iteration in a Megatron checkpoint's folder; None for one without (`release`)."""
    content = (Path(path) / TRACKER).read_text().strip()
    return int(content) if content.isdigit() else None


def read_hf_config(path: str) -> dict[str, Any]:
    """The config.json of a Hugging Face folder.

    Raises:
        ConfigError: it isn't JSON, or not an object.
    """
    file = Path(path) / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file} must hold an object, not a {type(config).__name__}")
    return config


def resolve_loading(context: Context) -> None:
    """`--load` where it has a checkpoint; else the weights alone, from `--load`, `--ref-load` or `--hf-checkpoint`.

    A `--load` without a checkpoint is an error, unless it is also `--save`: then the run starts afresh there and
    resumes the next time. With LoRA the weights are those of `--hf-checkpoint`. `args.resume_folder` is the `--load`
    that is such a folder.
    """
    args = context.args
    args.resume_folder = None
    context.fill_none("ref_load", args.hf_checkpoint)
    if is_megatron_checkpoint(args.load):
        for dest in ("no_load_optim", "no_load_rng", "finetune"):
            context.fill_none(dest, False)
        if args.finetune:
            context.fill_none("start_rollout_id", 0)
        else:
            args.resume_folder = args.load
        return
    if args.load is not None and not is_hf_checkpoint(args.load):
        context.require(
            _same_folder(args.load, args.save) and not args.exit_on_missing_checkpoint,
            f"{context.shown('load')} has neither a Megatron checkpoint ({TRACKER}) nor a config.json "
            "(a folder that is also --save may be empty without --exit-on-missing-checkpoint)",
        )
        context.require(args.ckpt_step is None, f"{context.shown('ckpt_step')}: {args.load} has no checkpoint yet")
        args.resume_folder = args.load
    for dest in ("no_load_optim", "no_load_rng", "finetune"):
        context.force(dest, True, "loading weights alone")
    if not is_hf_checkpoint(args.load):
        args.load = args.ref_load if args.lora_rank is None else args.hf_checkpoint
        if args.lora_rank is None and args.ref_ckpt_step is not None:
            args.ckpt_step = args.ref_ckpt_step
    context.fill_none("start_rollout_id", 0)


def check_loading(context: Context) -> None:
    """Folders that must exist."""
    args = context.args
    if args.hf_checkpoint is None:
        context.problems.add("--hf-checkpoint is needed: tokenizer, architecture and the engines' weights are there")
    elif not is_hf_checkpoint(args.hf_checkpoint):
        context.problems.add(f"{context.shown('hf_checkpoint')}: no config.json there")
    needs_reference = args.kl_coef != 0 or args.use_kl_loss
    if context.given("ref_load") or (needs_reference and args.ref_load != args.hf_checkpoint):
        context.require(
            is_megatron_checkpoint(args.ref_load) or is_hf_checkpoint(args.ref_load),
            f"{context.shown('ref_load')}: neither a Megatron checkpoint ({TRACKER}) nor a config.json there",
        )


def check_saving(context: Context) -> None:
    """A save that would fail hours later fails now."""
    args = context.args
    context.needs("save_interval", "save")
    context.needs("keep_checkpoints", "save")
    if args.save is not None and args.save_interval is None and context.given("save"):
        context.notice("%s without --save-interval: no checkpoint is saved", context.shown("save"))
    context.needs("max_restarts", "save_interval")
    for dest in ("start_rollout_id", "ckpt_step", "no_load_optim", "no_load_rng"):
        if args.max_restarts and context.given(dest):
            context.problems.add(
                f"{context.shown('max_restarts')}: restarts resume from the newest checkpoint, which "
                f"{context.shown(dest)} prevents"
            )
    context.needs("use_stateless_adam", "no_save_optim")
    if args.save_hf is not None:
        check_template(context, "save_hf", {"rollout_id": 0})


def resolve_dumps(context: Context) -> None:
    """Both dumps go below `--dump-details`."""
    args = context.args
    if args.dump_details is not None:
        context.force(
            "save_debug_rollout_data",
            f"{args.dump_details}/rollout_data/{{rollout_id}}.pt",
            context.name("dump_details"),
        )
        context.force(
            "save_debug_train_data",
            f"{args.dump_details}/train_data/{{rollout_id}}_{{rank}}.pt",
            context.name("dump_details"),
        )


def check_dumps(context: Context) -> None:
    """Path templates of dumps."""
    args = context.args
    rollout, train = args.save_debug_rollout_data, args.save_debug_train_data
    if rollout is not None and rollout == train:
        context.problems.add(f"--save-debug-rollout-data and --save-debug-train-data are both {rollout}")
    check_template(context, "save_debug_rollout_data", {"rollout_id": 0})
    check_template(context, "load_debug_rollout_data", {"rollout_id": 0})
    check_template(context, "load_forge_rollout_data", {"rollout_id": 0})
    check_template(context, "save_debug_train_data", {"rollout_id": 0, "rank": 0})
    for dest in ("ci_save_grad_norm", "ci_load_grad_norm"):
        check_template(context, dest, {"role": 0, "rollout_id": 0, "step_id": 0})
    if "train_overall" in args.profile_target and len(args.profile_target) > 1:
        context.problems.add("--profile-target train_overall includes the other targets: give it alone, or only them")


def check_template(context: Context, dest: str, names: dict[str, int]) -> None:
    """A path whose braces hold other names than `names`."""
    template = getattr(context.args, dest)
    if template is None:
        return
    try:
        template.format(**names)
    except (KeyError, IndexError, ValueError) as error:
        allowed = ", ".join(f"{{{name}}}" for name in names)
        context.problems.add(f"{context.shown(dest)}: {error} can't be filled in (there is {allowed})")


def _same_folder(first: str, second: str | None) -> bool:
    return second is not None and os.path.realpath(first) == os.path.realpath(second)
