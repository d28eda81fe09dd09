"""Flags of sglang-router's RouterArgs as `--router-*`.

Written for sglang-router 0.3.2. Its arguments module is light (no torch), so it is imported.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
from typing import Any

from slime.utils.arguments.argparse_flags import flags_of_parser
from slime.utils.arguments.flag import Flag

PREFIX = "router_"

# cache_aware, the router's own default, sends requests given as token ids to one worker
_DEFAULTS: dict[str, Any] = {
    "router_policy": "round_robin",
    "router_log_level": "warn",
    "router_balance_abs_threshold": 10,
    "router_balance_rel_threshold": 1.2,
}
# slime sets them
_NOT_EXPOSED = frozenset({"worker_urls", "router_prefill", "router_decode", "router_request_timeout_secs"})


@functools.cache
def router_flags() -> tuple[Flag, ...]:
    """One flag per router setting; none where sglang-router isn't installed."""
    if importlib.util.find_spec("sglang_router") is None:
        return ()
    from sglang_router.router_args import RouterArgs

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    RouterArgs.add_cli_args(parser, use_router_prefix=True, exclude_host_port=True)
    flags = [entry for entry in flags_of_parser(parser, "SGLang router") if entry.dest.startswith(PREFIX)]
    return tuple(_adapted(entry) for entry in flags if entry.dest not in _NOT_EXPOSED)


def _adapted(entry: Flag) -> Flag:
    """With our default, and the choices sorted: the router lists some in another order each time."""
    choices = None if entry.choices is None else tuple(sorted(entry.choices))
    return dataclasses.replace(entry, default=_DEFAULTS.get(entry.dest, entry.default), choices=choices)
