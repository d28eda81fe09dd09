"""Evaluation data sets."""

from __future__ import annotations

from pathlib import Path

from slime.utils.arguments.rules.batches import check_data_file
from slime.utils.arguments.rules.context import Context


def resolve_evaluation(context: Context) -> None:
    """One file without a name is called `aime`, as slime does."""
    values = context.args.eval_prompt_data
    if values is not None and len(values) == 1:
        context.args.eval_prompt_data = ["aime", *values]


def check_evaluation(context: Context) -> None:
    """Data sets exist where evaluations are asked for."""
    args = context.args
    context.exclusive("eval_prompt_data", "eval_config")
    values = args.eval_prompt_data or []
    if len(values) % 2:
        context.problems.add(
            f"{context.name('eval_prompt_data')} takes pairs of name and file, got {len(values)} words"
        )
    for name, path in zip(values[::2], values[1::2], strict=False):
        check_data_file(context, f"{context.name('eval_prompt_data')} {name}", path)
    if args.eval_config is not None and not Path(args.eval_config).is_file():
        context.problems.add(f"{context.name('eval_config')}: no such file: {args.eval_config}")
    if args.eval_interval is not None:
        context.require(
            values or args.eval_config, f"{context.shown('eval_interval')} needs --eval-prompt-data or --eval-config"
        )
