"""The namespace under examination, with what the user gave and the problems found."""

from __future__ import annotations

import argparse
import logging
from typing import Any

from slime.utils.arguments.errors import Problems
from slime.utils.arguments.table import FlagTable

logger = logging.getLogger("slime.arguments")


class Context:
    """`origin` maps each attribute that the user gave to where it was given."""

    def __init__(self, args: argparse.Namespace, origin: dict[str, str], table: FlagTable) -> None:
        self.args = args
        self.origin = origin
        self.table = table
        self.problems = Problems()

    def given(self, dest: str) -> bool:
        return dest in self.origin

    def name(self, dest: str) -> str:
        """How messages call a setting: as the user gave it, else by its flag."""
        if dest in self.origin:
            return self.origin[dest]
        entry = self.table.by_dest.get(dest)
        return entry.name if entry is not None else dest

    def shown(self, dest: str) -> str:
        """The setting with its value, such as `--save-interval 5`."""
        value = getattr(self.args, dest)
        return self.name(dest) if value is True else f"{self.name(dest)} {value}"

    def fill(self, dest: str, value: Any) -> None:
        """Set what the user left open."""
        if not self.given(dest):
            setattr(self.args, dest, value)

    def fill_none(self, dest: str, value: Any) -> None:
        """Set what is still None."""
        if getattr(self.args, dest) is None:
            setattr(self.args, dest, value)

    def force(self, dest: str, value: Any, because: str) -> None:
        """Set what another setting decides; a different value that the user gave is a contradiction."""
        if self.given(dest) and getattr(self.args, dest) not in (value, None):
            self.problems.add(f"{self.shown(dest)} contradicts {because}, which needs {value!r}")
        else:
            setattr(self.args, dest, value)

    def require(self, condition: object, problem: str) -> None:
        self.problems.require(condition, problem)

    def exclusive(self, first: str, second: str) -> None:
        """At most one of two settings may be set."""
        if getattr(self.args, first) and getattr(self.args, second):
            self.problems.add(f"{self.shown(first)} and {self.shown(second)} exclude each other")

    def needs(self, dest: str, other: str) -> None:
        """A setting that is set needs another one."""
        if getattr(self.args, dest) and not getattr(self.args, other):
            self.problems.add(f"{self.shown(dest)} needs {self.name(other)}")

    def notice(self, message: str, *values: Any) -> None:
        """A line for the log about something that the user should know but that is no error."""
        logger.warning(message, *values)
