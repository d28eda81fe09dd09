"""From the words of the command line to explicit settings. No abbreviations, nothing ignored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slime.utils.arguments.errors import ConfigError, Problems, suggestion
from slime.utils.arguments.flag import Flag
from slime.utils.arguments.settings import Settings
from slime.utils.arguments.table import REMOVED, FlagTable


def parse_command_line(argv: Sequence[str], table: FlagTable) -> Settings:
    """The settings that `argv` gives. A flag given twice takes its last value, as in argparse.

    Raises:
        ConfigError: with every unknown flag (and the nearest names), missing, surplus or wrong value.
    """
    problems = Problems()
    settings = Settings()
    position = 0
    while position < len(argv):
        word = argv[position]
        values = _values_after(argv, position)
        position += 1 + len(values)
        if not _is_option(word):
            problems.add(f"unexpected argument {word!r}: every value follows its --flag")
            position -= len(values)
            continue
        name, equals, inline = word.partition("=")
        entry = table.by_spelling.get(name)
        if entry is None:
            problems.add(_unknown(name, table))
            continue
        try:
            value = _read(entry, name, [inline] if equals else [], values)
        except ConfigError as error:
            problems.found += error.problems
            continue
        if entry.nargs == "append":
            value = [*settings.values.get(entry.dest, []), *value]
        settings.set(entry.dest, value, name)
    problems.raise_if_any()
    return settings


def _values_after(argv: Sequence[str], position: int) -> list[str]:
    values = []
    for word in argv[position + 1 :]:
        if _is_option(word):
            break
        values.append(word)
    return values


def _is_option(word: str) -> bool:
    return word.startswith("--") and len(word) > 2


def _unknown(name: str, table: FlagTable) -> str:
    if name in REMOVED:
        return f"{name} is not a flag: {REMOVED[name]}"
    return f"unknown flag {name}{suggestion(name, table.by_spelling)}"


def _read(entry: Flag, name: str, inline: list[str], following: list[str]) -> Any:
    words = inline or following
    if inline and following:
        raise ConfigError(f"unexpected argument {following[0]!r} after {name}={inline[0]}")
    if entry.is_switch:
        if words:
            raise ConfigError(f"{name} takes no value, but {words[0]!r} follows it")
        return name not in entry.off_names
    if entry.nargs is None:
        if not words:
            raise ConfigError(f"{name} needs a value")
        if len(words) > 1:
            raise ConfigError(f"{name} takes one value, but {' '.join(words)!r} follows it")
        return entry.parse(words[0])
    return _read_list(entry, name, words)


def _read_list(entry: Flag, name: str, words: list[str]) -> Any:
    if entry.nargs == "?":
        return entry.parse(words[0]) if words else entry.bare
    if entry.nargs != "*" and not words:
        raise ConfigError(f"{name} needs a value")
    if isinstance(entry.nargs, int) and len(words) != entry.nargs:
        raise ConfigError(f"{name} takes {entry.nargs} values, but {len(words)} follow it: {' '.join(words)}")
    return [entry.parse(word) for word in words]
