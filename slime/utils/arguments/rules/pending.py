"""Settings that exist but aren't built yet."""

from __future__ import annotations

from slime.utils.arguments.rules.context import Context


def check_pending(context: Context) -> None:
    """An error for each setting given whose feature isn't there."""
    for dest in context.origin:
        entry = context.table.by_dest.get(dest)
        if entry is None:
            continue
        value = getattr(context.args, dest)
        if entry.pending is not None and value != entry.default:
            context.problems.add(f"{context.name(dest)} is not supported yet: {entry.pending}")
        elif isinstance(value, str) and value in entry.pending_choices:
            context.problems.add(f"{context.shown(dest)} is not supported yet: {entry.pending_choices[value]}")
