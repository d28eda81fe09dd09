"""A command-line flag as data."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime.utils.arguments.errors import ConfigError

Parser = Callable[[str], Any]


@dataclass(frozen=True)
class Flag:
    """One setting: how it is spelled, how its value is read, its default and what it means.

    A setting whose `type` is bool takes no value: the spellings in `names` store True, those in `off_names` store
    False. `nargs` is None (one value), "?" (one or none; without one it is `bare`), "*", "+" or a count (a list), or
    "append" (the flag may be repeated).
    `pending` says what a setting that is not built yet waits for; giving it is an error. `pending_choices` does so
    for single values.
    """

    dest: str
    type: Parser | type = str
    default: Any = None
    help: str = ""
    names: tuple[str, ...] = ()
    off_names: tuple[str, ...] = ()
    choices: tuple[Any, ...] | None = None
    nargs: str | int | None = None
    required: bool = False
    bare: Any = None
    pending: str | None = None
    pending_choices: dict[Any, str] = field(default_factory=dict)
    group: str = ""

    @property
    def is_switch(self) -> bool:
        return self.type is bool

    @property
    def is_list(self) -> bool:
        return self.nargs is not None and self.nargs != "?"

    @property
    def spellings(self) -> tuple[str, ...]:
        return (*self.names, *self.off_names)

    @property
    def name(self) -> str:
        """The spelling that messages use."""
        return self.spellings[0]

    def parse(self, text: str) -> Any:
        """One value from its text.

        Raises:
            ConfigError: the text isn't a value of this flag's type or choices.
        """
        try:
            value = self.type(text)
        except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
            raise ConfigError(f"{self.name}: {text!r} is not {_type_name(self.type, error)}") from error
        return self.check_choice(value)

    def check_choice(self, value: Any) -> Any:
        """`value` itself if it is among the choices.

        Raises:
            ConfigError: it isn't; the message lists the choices.
        """
        if self.choices is not None and value not in self.choices:
            listed = ", ".join(str(choice) for choice in self.choices)
            raise ConfigError(f"{self.name}: {value!r} is not one of {listed}")
        return value


def flag(name: str, type: Parser | type = str, default: Any = None, help: str = "", **options: Any) -> Flag:
    """A flag spelled `name`; its attribute is the name with underscores unless `dest` is given."""
    dest = options.pop("dest", name.lstrip("-").replace("-", "_"))
    return Flag(dest=dest, type=type, default=default, help=help, names=(name, *options.pop("aliases", ())), **options)


def switch(name: str, help: str = "", default: bool | None = False, **options: Any) -> Flag:
    """A switch that is off (or undecided, `default=None`) until given; `--no-...` turns it off again."""
    dest = options.pop("dest", name.lstrip("-").replace("-", "_"))
    off = () if name.startswith(("--no-", "--disable-")) else (f"--no-{name.lstrip('-')}",)
    return Flag(dest=dest, type=bool, default=default, help=help, names=(name,), off_names=off, **options)


def off_switch(name: str, dest: str, help: str = "", **options: Any) -> Flag:
    """A switch that is on until `name` (`--disable-...`, `--no-...`) is given; `--<dest>` turns it on again."""
    on = f"--{dest.replace('_', '-')}"
    return Flag(dest=dest, type=bool, default=True, help=help, names=(on,), off_names=(name,), **options)


def json_value(text: str) -> Any:
    """A JSON value given on the command line."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error}") from error


def positive_int(text: str) -> int:
    """An integer above zero."""
    value = int(text)
    if value <= 0:
        raise ValueError("must be above 0")
    return value


def non_negative_int(text: str) -> int:
    """An integer that is not below zero."""
    value = int(text)
    if value < 0:
        raise ValueError("must not be below 0")
    return value


def in_group(group: str, flags: Sequence[Flag]) -> list[Flag]:
    """The same flags with their help group set."""
    return [dataclasses.replace(entry, group=group) for entry in flags]


def _type_name(parser: Parser | type, error: Exception) -> str:
    """What a value should have been. Python's own words ("invalid literal for int()") add nothing to a plain name."""
    plain = {
        int: "an integer",
        float: "a number",
        positive_int: "an integer above 0",
        non_negative_int: "an integer of 0 or more",
    }
    if parser in plain:
        return plain[parser]
    kind = "JSON" if parser is json_value else f"a value for {getattr(parser, '__name__', parser)}"
    return f"{kind} ({error})"
