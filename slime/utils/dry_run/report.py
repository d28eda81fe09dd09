"""The whole dry run, as text or JSON."""

from __future__ import annotations

import dataclasses
import json
from argparse import Namespace
from collections.abc import Iterable
from typing import Any

from slime.utils.arguments.flag import Flag
from slime.utils.dry_run import text
from slime.utils.dry_run.batches import plan_batches
from slime.utils.dry_run.memory import plan_memory
from slime.utils.dry_run.placement import plan_placement
from slime.utils.dry_run.settings import changed, resolved_settings


def dry_run_report(args: Namespace, flags: Iterable[Flag]) -> str:
    """What the run would be, in the form that `args.dry_run` names: changed, full or json.

    Args:
        args: resolved and checked.
        flags: the flag table.
    """
    settings = resolved_settings(args, flags)
    placement, batches, memory = plan_placement(args), plan_batches(args), plan_memory(args)
    if args.dry_run == "json":
        content = {
            "settings": {setting.name: setting.value for setting in settings},
            "origins": {setting.name: setting.origin for setting in changed(settings)},
            "placement": [dataclasses.asdict(device) for device in placement],
            "batches": None if batches is None else dataclasses.asdict(batches),
            "memory": dataclasses.asdict(memory),
        }
        return json.dumps(content, indent=2, default=_plain)
    shown, title = (settings, "all settings") if args.dry_run == "full" else (changed(settings), "not at its default")
    sections = {
        f"configuration ({title})": text.settings_lines(shown),
        "placement": text.placement_lines(placement),
        "batches": text.batch_lines(batches),
        "memory per device": text.memory_lines(memory),
    }
    return "\n\n".join("\n".join([f"{name}:", *lines]) for name, lines in sections.items())


def _plain(value: Any) -> Any:
    """What JSON has no form for: a data class as its fields, anything else as its text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return str(value)
