"""How weights reach the engines."""

from __future__ import annotations

import os

from slime.utils.arguments.rules.context import Context

_DISK_ONLY = (
    "update_weight_disk_dir",
    "update_weight_disk_keep_files",
    "update_weight_local_checkpoint_dir",
    "custom_update_weight_post_write_path",
)
_DELTA_ONLY = ("update_weight_delta_encoding", "update_weight_delta_checksum")


def check_weight_sync(context: Context) -> None:
    """The settings of the disk transport belong together."""
    args = context.args
    disk, delta = args.update_weight_transport == "disk", args.update_weight_mode == "delta"
    for dest in _DISK_ONLY:
        context.require(disk or not getattr(args, dest), f"{context.shown(dest)} needs --update-weight-transport disk")
    for dest in _DELTA_ONLY:
        context.require(delta or not context.given(dest), f"{context.shown(dest)} needs --update-weight-mode delta")
    if disk:
        context.require(args.update_weight_disk_dir, "--update-weight-transport disk needs --update-weight-disk-dir")
    if delta:
        _check_delta(context)
    if args.update_weight_local_checkpoint_dir is not None:
        _check_local_folder(context)


def _check_delta(context: Context) -> None:
    args = context.args
    context.require(
        args.update_weight_transport == "disk", "--update-weight-mode delta needs --update-weight-transport disk"
    )
    context.require(
        args.update_weight_local_checkpoint_dir,
        "--update-weight-mode delta needs --update-weight-local-checkpoint-dir, which deltas are applied to",
    )
    context.require(
        not args.colocate,
        f"--update-weight-mode delta can't be run with {context.name('colocate')}: trainers and engines on the same "
        "devices hand weights over in memory",
    )


def _check_local_folder(context: Context) -> None:
    args = context.args
    local = os.path.realpath(args.update_weight_local_checkpoint_dir)
    for dest in ("update_weight_disk_dir", "hf_checkpoint", "load", "save"):
        other = getattr(args, dest)
        context.require(
            other is None or os.path.realpath(other) != local,
            f"{context.shown('update_weight_local_checkpoint_dir')} is also {context.name(dest)}: it is replaced by "
            "weight updates and must be a folder of its own",
        )
