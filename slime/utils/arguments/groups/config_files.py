"""Files that hold settings."""

from __future__ import annotations

from slime.utils.arguments.flag import flag, in_group

FLAGS = in_group(
    "Configuration files",
    [
        flag("--config", str, None, "YAML file of settings; the command line wins over it"),
        flag("--custom-config-path", str, None, "the same, under the name that scripts use"),
    ],
)
