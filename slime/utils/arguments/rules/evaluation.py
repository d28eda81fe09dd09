"""Evaluation data sets: from `--eval-config` or `--eval-prompt-data` to `args.eval_datasets`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slime.utils.arguments.errors import ConfigError
from slime.utils.arguments.rules.batches import check_data_file
from slime.utils.arguments.rules.context import Context
from slime.utils.arguments.yaml_config import load_yaml_mapping
from slime.utils.eval_config import build_eval_dataset_configs, ensure_dataset_list


def resolve_evaluation(context: Context) -> None:
    """`eval_datasets`, complete with their defaults, and `eval_prompt_data` as the flat list of names and files."""
    args = context.args
    args.eval_datasets = []
    context.exclusive("eval_prompt_data", "eval_config")
    source, read = ("eval_config", _from_file) if args.eval_config is not None else ("eval_prompt_data", _from_flag)
    try:
        entries, defaults = read(context)
        args.eval_datasets = build_eval_dataset_configs(args, entries, defaults)
    except ConfigError as error:
        context.problems.found += [f"{context.name(source)}: {problem}" for problem in error.problems]
    except ValueError as error:
        context.problems.add(f"{context.name(source)}: {error}")
    if args.eval_datasets:
        args.eval_prompt_data = [word for config in args.eval_datasets for word in (config.name, config.path)]


def check_evaluation(context: Context) -> None:
    """Data sets exist where evaluations are asked for."""
    args = context.args
    for config in args.eval_datasets:
        check_data_file(context, f"evaluation data set {config.name!r}", config.path)
    if args.eval_interval is not None and not args.debug_train_only:
        context.require(
            args.eval_config or args.eval_prompt_data,
            f"{context.shown('eval_interval')} needs --eval-prompt-data or --eval-config",
        )


def _from_flag(context: Context) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Pairs of name and file; one file alone is called `aime`, as slime does."""
    words = context.args.eval_prompt_data or []
    words = ["aime", *words] if len(words) == 1 else words
    if len(words) % 2:
        raise ConfigError(f"takes pairs of name and file, got {len(words)} words")
    return [{"name": name, "path": path} for name, path in zip(words[::2], words[1::2], strict=True)], {}


def _from_file(context: Context) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """`defaults` and `datasets` of the YAML file, at its root or below `eval`."""
    path = context.args.eval_config
    if not Path(path).is_file():
        raise ConfigError(f"no such file: {path}")
    content = load_yaml_mapping(path)
    content = content.get("eval", content)
    unknown = [key for key in content if key not in ("defaults", "datasets")]
    if unknown:
        raise ConfigError(f"{path}: unknown key {unknown[0]!r} (there are defaults and datasets)")
    return ensure_dataset_list(content.get("datasets")), content.get("defaults") or {}
