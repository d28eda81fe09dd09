"""The resolved settings: their values, and who decided them."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from slime.utils.arguments.flag import Flag

# Settings that may hold a credential: shown only as given or not.
SECRETS = frozenset({"wandb_key", "sglang_api_key", "sglang_admin_api_key", "router_api_key"})
_HIDDEN = "(hidden)"


@dataclass(frozen=True)
class Setting:
    """One setting. `origin` is where the user gave it, "derived" where slime worked it out, None at its default."""

    name: str
    value: Any
    origin: str | None


def resolved_settings(args: Namespace, flags: Iterable[Flag]) -> list[Setting]:
    """Every setting of the table in its order, then what slime adds to the namespace."""
    entries = list(flags)
    known = {entry.dest: entry for entry in entries}
    own = [name for name in vars(args) if name not in known and name != "set_by_user"]
    settings = [_setting(args, entry.dest, entry.default) for entry in entries]
    return settings + [_setting(args, name, None) for name in own]


def changed(settings: Iterable[Setting]) -> list[Setting]:
    """Those that differ from their defaults."""
    return [setting for setting in settings if setting.origin is not None]


def _setting(args: Namespace, name: str, default: Any) -> Setting:
    value = getattr(args, name)
    given = args.set_by_user.get(name)
    origin = None if value == default else given or "derived"
    if value is not None and (name in SECRETS or "api_key" in name):
        value = _HIDDEN
    return Setting(name, value, origin)
