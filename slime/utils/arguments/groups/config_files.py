"""Files that hold settings, and a look at what all settings come to."""

from __future__ import annotations

from slime.utils.arguments.flag import Flag, flag, in_group

FLAGS = in_group(
    "Configuration",
    [
        flag("--config", str, None, "YAML file of settings; the command line wins over it"),
        flag("--custom-config-path", str, None, "the same, under the name that scripts use"),
        Flag(
            "dry_run",
            str,
            None,
            "print what the run would be (settings that differ from their defaults, placement, batches, memory) and "
            "exit; full: all settings; json: everything as JSON",
            ("--dry-run",),
            choices=("changed", "full", "json"),
            nargs="?",
            bare="changed",
        ),
    ],
)
