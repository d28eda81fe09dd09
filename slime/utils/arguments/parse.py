"""The steps from a command line to a checked namespace."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from slime.utils.arguments.command_line import parse_command_line
from slime.utils.arguments.errors import ConfigError
from slime.utils.arguments.help_text import help_text, print_text
from slime.utils.arguments.hooks import check_hooks
from slime.utils.arguments.pipeline import SLIME_RULES, apply_rules, rules_for
from slime.utils.arguments.rules.context import Context
from slime.utils.arguments.settings import Settings
from slime.utils.arguments.table import AddCustomArguments, FlagTable, flag_table
from slime.utils.arguments.yaml_config import merge_yaml_files


def parse_args(
    add_custom_arguments: AddCustomArguments | None = None,
    argv: Sequence[str] | None = None,
    rollouts_ahead: int = 0,
) -> argparse.Namespace:
    """The configuration of a run, complete and checked, from the command line (`argv`, or the process's own).

    Command line over YAML over the model's config.json over defaults. `args.set_by_user` says, for every attribute
    that the user gave, where. A configuration that can't run ends the process with status 2 and one line per problem,
    before anything is started; so does `--help`, and `--dry-run` after its report, with status 0.

    Args:
        add_custom_arguments: adds options of one's own to the parser that it is given.
        rollouts_ahead: by how many rollouts the driver lets sampling run ahead of training: 1 in `train_async.py`.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        table = flag_table()
        if add_custom_arguments is not None:
            table = table.with_custom(add_custom_arguments)
        if "--help" in words or "-h" in words:
            print_text(help_text(table))
            raise SystemExit(0)
        settings = merge_yaml_files(parse_command_line(words, table), table)
        args = namespace_of(settings, table)
        args.rollouts_ahead = rollouts_ahead
        _resolve_and_check(args, table)
    except ConfigError as error:
        exit_with(error)
    if args.dry_run is not None:
        _print_dry_run(args, table)
        raise SystemExit(0)
    return args


def namespace_of(settings: Settings, table: FlagTable) -> argparse.Namespace:
    """Explicit settings over the defaults of the table."""
    args = argparse.Namespace(**{**table.defaults(), **settings.values})
    args.set_by_user = dict(settings.origin)
    return args


def slime_validate_args(args: argparse.Namespace) -> None:
    """Resolve and check slime's own settings on a namespace, in place.

    What a namespace made by hand lacks is filled with the flag table's defaults; what differs from its default counts
    as given by the user.

    Raises:
        ConfigError (a ValueError): with all problems.
    """
    table = flag_table()
    _complete(args, table)
    apply_rules(Context(args, args.set_by_user, table), SLIME_RULES)


def exit_with(error: ConfigError) -> NoReturn:
    """One line per problem, and status 2."""
    for problem in error.problems:
        print(f"slime: error: {problem}", file=sys.stderr)
    raise SystemExit(2)


def _resolve_and_check(args: argparse.Namespace, table: FlagTable) -> None:
    context = Context(args, args.set_by_user, table)
    for rule in rules_for(args):
        rule(context)
    check_hooks(context)
    context.problems.raise_if_any()


def _print_dry_run(args: argparse.Namespace, table: FlagTable) -> None:
    from slime.utils.dry_run import dry_run_report

    print_text(dry_run_report(args, table))


def _complete(args: argparse.Namespace, table: FlagTable) -> None:
    defaults = table.defaults()
    present: dict[str, Any] = vars(args)
    if "set_by_user" not in present:
        given = {dest: value for dest, value in present.items() if dest in defaults and value != defaults[dest]}
        args.set_by_user = {dest: table.by_dest[dest].name for dest in given}
    for dest, default in defaults.items():
        if dest not in present:
            setattr(args, dest, default)
