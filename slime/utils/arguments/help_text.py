"""The text of `--help`."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterable
from itertools import groupby

from slime.utils.arguments.flag import Flag

_INTRO = """\
usage: python train.py [--flag value ...]

Names are never abbreviated. A flag given twice takes its last value. The command line wins over YAML files (--config),
those over the model's config.json, that over the defaults shown here in brackets."""


def print_text(text: str) -> None:
    """Print to standard output; a reader that closes the pipe early (`| head`) is fine."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit


def help_text(flags: Iterable[Flag]) -> str:
    """All flags by group: spellings, default, choices, meaning, and whether it is built yet."""
    parts = [_INTRO]
    for group, members in groupby(flags, key=lambda entry: entry.group):
        parts.append(f"\n{group}:")
        parts += [_entry(member) for member in members]
    return "\n".join(parts)


def _entry(entry: Flag) -> str:
    value = (
        "" if entry.is_switch else f" {entry.dest.upper()}" if entry.choices is None else " {" + _choices(entry) + "}"
    )
    head = f"  {', '.join(entry.spellings)}{value}"
    notes = [entry.help or "", "(required)" if entry.required else _default(entry)]
    if entry.pending is not None:
        notes.append(f"(not supported yet: {entry.pending})")
    body = " ".join(note for note in notes if note)
    return f"{head}\n{textwrap.fill(body, 112, initial_indent='        ', subsequent_indent='        ')}"


def _choices(entry: Flag) -> str:
    return ",".join(str(choice) for choice in entry.choices or ())


def _default(entry: Flag) -> str:
    return "" if entry.default in (None, [], {}, "") else f"[{entry.default}]"
