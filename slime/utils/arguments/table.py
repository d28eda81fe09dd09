"""The table of all flags: slime's own, Megatron's, SGLang's and the router's."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

from slime.utils.arguments.argparse_flags import flags_of_parser
from slime.utils.arguments.errors import ConfigError
from slime.utils.arguments.flag import Flag
from slime.utils.arguments.groups import SLIME_FLAGS
from slime.utils.arguments.groups.megatron_lm import FLAGS as MEGATRON_LM_FLAGS
from slime.utils.arguments.megatron_flags import megatron_config_flags
from slime.utils.arguments.router_flags import router_flags
from slime.utils.arguments.sglang_flags import sglang_flags

AddCustomArguments = Callable[[argparse.ArgumentParser], argparse.ArgumentParser | None]

# flags of other versions of slime that had no effect there
REMOVED = {
    "--http-proxy": "it never had an effect",
    "--log-probs-max-tokens-per-gpu": "it never had an effect; --max-tokens-per-gpu counts",
    "--min-batch-collection-ratio": "it never had an effect",
}


class FlagTable:
    """All flags, found by spelling or by attribute."""

    def __init__(self, flags: Iterable[Flag]) -> None:
        self.by_dest: dict[str, Flag] = {}
        self.by_spelling: dict[str, Flag] = {}
        for entry in flags:
            self._add(entry)

    def __iter__(self) -> Any:
        return iter(self.by_dest.values())

    def defaults(self) -> dict[str, Any]:
        """A fresh copy of every default."""
        return {dest: copy.deepcopy(entry.default) for dest, entry in self.by_dest.items()}

    def with_custom(self, add_custom_arguments: AddCustomArguments) -> FlagTable:
        """This table and the options that a user's function adds; one that exists already only changes its default."""
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        add_custom_arguments(parser)
        flags = dict(self.by_dest)
        for entry in flags_of_parser(parser, "Custom"):
            known = self.by_spelling.get(entry.name)
            if known is not None:
                flags[known.dest] = dataclasses.replace(known, default=entry.default, required=False)
            else:
                flags[entry.dest] = entry
        return FlagTable(flags.values())

    def _add(self, entry: Flag) -> None:
        self.by_dest[entry.dest] = entry
        for spelling in entry.spellings:
            other = self.by_spelling.setdefault(spelling, entry)
            if other is not entry:
                raise ConfigError(f"{spelling} is in the flag table twice: {other.dest} and {entry.dest}")


@functools.cache
def flag_table() -> FlagTable:
    """Every flag; where two families have one setting, slime's own entry counts."""
    own = {entry.dest for entry in SLIME_FLAGS} | {entry.dest for entry in MEGATRON_LM_FLAGS}
    config = [entry for entry in megatron_config_flags() if entry.dest not in own]
    return FlagTable([*SLIME_FLAGS, *MEGATRON_LM_FLAGS, *config, *sglang_flags(), *router_flags()])


def reset_arg(parser: argparse.ArgumentParser, name: str, **kwargs: Any) -> None:
    """Change the default of the option `name`, or add the option; for functions given to `parse_args`."""
    for action in parser._actions:
        if name in action.option_strings:
            if "default" in kwargs:
                action.default = kwargs["default"]
            return
    parser.add_argument(name, **kwargs)
