"""Evaluation data sets: from `--eval-config` or `--eval-prompt-data` to `args.eval_datasets`."""

from __future__ import annotations

from slime.utils.arguments.errors import ConfigError
from slime.utils.arguments.rules.batches import check_data_file
from slime.utils.arguments.rules.context import Context
from slime.utils.arguments.yaml_config import load_yaml_mapping
from slime.utils.eval_config import EvalDatasetConfig, resolve_eval_datasets
from slime.utils.read_rows import wanted_columns


def resolve_evaluation(context: Context) -> None:
    """`eval_datasets`, complete with their defaults, and `eval_prompt_data` as the flat list of names and files."""
    args = context.args
    if context.given("eval_prompt_data") and context.given("eval_config"):
        context.exclusive("eval_prompt_data", "eval_config")
    args.eval_datasets = []
    source = "eval_config" if args.eval_config is not None else "eval_prompt_data"
    try:
        args.eval_datasets = _read(context)
    except ValueError as error:
        context.problems.add(f"{context.name(source)}: {error}")
        args.eval_datasets = []  # later rules go through it
    if args.eval_datasets:
        args.eval_prompt_data = [word for config in args.eval_datasets for word in (config.name, config.path)]


def check_evaluation(context: Context) -> None:
    """Data sets exist where evaluations are asked for."""
    args = context.args
    for config in args.eval_datasets:
        wanted = wanted_columns(config.input_key, config.label_key, config.tool_key, config.multimodal_keys)
        check_data_file(context, f"evaluation data set {config.name!r}", config.path, wanted)
    if args.eval_datasets and args.eval_interval is None:
        context.notice("evaluation data sets without --eval-interval: nothing is evaluated")
    if args.eval_interval is not None and not args.debug_train_only:
        context.require(
            args.eval_config or args.eval_prompt_data,
            f"{context.shown('eval_interval')} needs --eval-prompt-data or --eval-config",
        )


def _read(context: Context) -> list[EvalDatasetConfig]:
    args = context.args
    if args.eval_config is not None:
        load_yaml_mapping(args.eval_config)  # a missing or broken file is an error that names it
    words = args.eval_prompt_data or []
    if len(words) > 1 and len(words) % 2:
        raise ConfigError(f"takes pairs of name and file, got {len(words)} words")
    args.eval_datasets = None
    return resolve_eval_datasets(args)
