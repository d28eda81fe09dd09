"""Flags taken over from an argparse parser that another package filled."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from slime.utils.arguments.flag import Flag


def flags_of_parser(parser: argparse.ArgumentParser, group: str) -> list[Flag]:
    """The parser's options as flags; several options with one destination become one flag."""
    flags: dict[str, Flag] = {}
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction) or not action.option_strings:
            continue
        new = _flag_of(action, group)
        old = flags.get(new.dest)
        flags[new.dest] = new if old is None else _merge(old, new)
    return list(flags.values())


def _flag_of(action: argparse.Action, group: str) -> Flag:
    names = tuple(action.option_strings)
    text = action.help or ""
    default = None if action.default is argparse.SUPPRESS else action.default
    if isinstance(action, argparse.BooleanOptionalAction):
        off = tuple(name for name in names if name.startswith("--no-"))
        on = tuple(name for name in names if name not in off)
        return Flag(action.dest, bool, default, text, on, off, group=group)
    if action.nargs == 0:
        stores_false = isinstance(action, argparse._StoreFalseAction)
        on, off = ((), names) if stores_false else (names, ())
        return Flag(action.dest, bool, default, text, on, off, group=group)
    choices = tuple(action.choices) if action.choices is not None else None
    parser: Any = action.type if callable(action.type) else str
    nargs = "append" if isinstance(action, argparse._AppendAction) else action.nargs
    required = action.required
    bare = action.const if nargs == "?" else None
    return Flag(action.dest, parser, default, text, names, (), choices, nargs, required, bare, group=group)


def _merge(old: Flag, new: Flag) -> Flag:
    return dataclasses.replace(
        old,
        names=tuple(dict.fromkeys((*old.names, *new.names))),
        off_names=tuple(dict.fromkeys((*old.off_names, *new.off_names))),
    )
