"""Who this run is and where its files go."""

from __future__ import annotations

import os
import secrets
import time

from slime.utils.arguments.rules.context import Context


def resolve_run(context: Context) -> None:
    """`run_id`, and an absolute `log_dir`: `outputs/<run name>-<time>` unless given."""
    args = context.args
    if getattr(args, "run_id", None) is None:
        args.run_id = secrets.token_hex(4)
    if args.log_dir is None:
        name = args.wandb_group or args.tb_experiment_name or "slime"
        args.log_dir = os.path.join("outputs", f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{args.run_id}")
    args.log_dir = os.path.abspath(args.log_dir)
