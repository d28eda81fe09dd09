"""Settings from YAML files (`--config`, `--custom-config-path`), with the same checks as flags.

A file is a mapping from a setting's name (`rollout_batch_size`, or `rollout-batch-size`) to its value. The section
`custom` holds settings of a user's own hooks: its keys become attributes of the namespace unchecked, and must not be
names of flags.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slime.utils.arguments.errors import ConfigError, Problems, suggestion
from slime.utils.arguments.flag import Flag, positive_int
from slime.utils.arguments.settings import Settings
from slime.utils.arguments.table import FlagTable

CUSTOM_SECTION = "custom"
FILE_FLAGS = ("config", "custom_config_path")


def merge_yaml_files(given: Settings, table: FlagTable) -> Settings:
    """`given` over the settings of the YAML files that it names.

    Raises:
        ConfigError: a file is missing or broken, a key unknown, a value of the wrong type, or two files disagree.
    """
    problems = Problems()
    merged = Settings()
    for dest in FILE_FLAGS:
        if given.values.get(dest) is None:
            continue
        try:
            read = read_yaml_settings(given.values[dest], table)
        except ConfigError as error:
            problems.found += error.problems
            continue
        for key, value in read.values.items():
            if key in merged.values and merged.values[key] != value:
                problems.add(f"{merged.origin[key]} is {merged.values[key]!r}, {read.origin[key]} is {value!r}")
        merged = read.over(merged)
    problems.raise_if_any()
    return given.over(merged)


def read_yaml_settings(path: str, table: FlagTable) -> Settings:
    """The settings of one file.

    Raises:
        ConfigError: with all its problems, each naming the file and the key.
    """
    problems = Problems()
    settings = Settings()
    content = load_yaml_mapping(path)
    custom = content.pop(CUSTOM_SECTION, None) or {}
    for key, value in content.items():
        dest = str(key).lstrip("-").replace("-", "_")
        entry = table.by_dest.get(dest) or table.by_spelling.get(f"--{str(key).lstrip('-').replace('_', '-')}")
        if entry is None:
            near = suggestion(dest, table.by_dest)
            problems.add(f"{path}: unknown key {key!r}{near}; settings of your own hooks go below `{CUSTOM_SECTION}:`")
        elif entry.dest in FILE_FLAGS:
            problems.add(f"{path}: {key} can't be set in a file")
        else:
            try:
                settings.set(entry.dest, convert_value(entry, value), f"{path}: {key}")
            except ConfigError as error:
                problems.found += [f"{path}: {problem}" for problem in error.problems]
    _add_custom(settings, custom, path, table, problems)
    problems.raise_if_any()
    return settings


def load_yaml_mapping(path: str) -> dict[str, Any]:
    """The mapping that a YAML file holds; an empty file is an empty mapping.

    Raises:
        ConfigError: the file is missing, isn't YAML, or holds something else.
    """
    import yaml

    if not Path(path).is_file():
        raise ConfigError(f"no such file: {path}")
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a mapping from settings to values, not a {type(content).__name__}")
    return content


def convert_value(entry: Flag, value: Any) -> Any:
    """A YAML value as the flag's type. null is allowed where the default is null.

    Raises:
        ConfigError: it isn't of that type or among the choices.
    """
    if value is None:
        if entry.default is None and not entry.required:
            return None
        raise ConfigError(f"{entry.dest} can't be null")
    if entry.is_switch:
        if not isinstance(value, bool):
            raise ConfigError(f"{entry.dest} must be true or false, not {value!r}")
        return value
    if entry.is_list:
        items = value if isinstance(value, list) else [value]
        if isinstance(entry.nargs, int) and len(items) != entry.nargs:
            raise ConfigError(f"{entry.dest} takes {entry.nargs} values, not {len(items)}")
        return [_convert_item(entry, item) for item in items]
    return _convert_item(entry, value)


def _convert_item(entry: Flag, value: Any) -> Any:
    if isinstance(value, dict | list):
        if entry.type in (str, int, float):
            raise ConfigError(f"{entry.dest} takes a plain value, not {value!r}")
        return value
    if isinstance(value, bool) and entry.type in (int, float, positive_int):
        raise ConfigError(f"{entry.dest} takes a number, not {value!r}")
    if entry.type is str and not isinstance(value, str):
        raise ConfigError(f"{entry.dest} takes a text; put {value!r} in quotes")
    return entry.parse(value if isinstance(value, str) else repr(value))


def _add_custom(settings: Settings, custom: Any, path: str, table: FlagTable, problems: Problems) -> None:
    if not isinstance(custom, dict):
        problems.add(f"{path}: `{CUSTOM_SECTION}` must hold a mapping")
        return
    for key, value in custom.items():
        if key in table.by_dest:
            problems.add(f"{path}: {CUSTOM_SECTION}.{key} is a setting of slime; put it outside `{CUSTOM_SECTION}:`")
        else:
            settings.set(str(key), value, f"{path}: {CUSTOM_SECTION}.{key}")
