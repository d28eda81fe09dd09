"""Settings that differ between actor and critic (`--megatron-config-path`)."""

from __future__ import annotations

import argparse
import copy
from typing import Any

from slime.utils.arguments.errors import ConfigError, Problems, suggestion
from slime.utils.arguments.table import flag_table
from slime.utils.arguments.yaml_config import convert_value, load_yaml_mapping

ROLES = ("actor", "critic")
_ENTRY_KEYS = ("name", "role", "overrides", "args", "num_nodes", "num_gpus_per_node")
# what a critic never has
_CRITIC = {
    "kl_coef": 0.0,
    "use_opd": False,
    "custom_advantage_function_path": None,
    "untie_embeddings_and_output_weights": True,
}


def parse_megatron_role_args(
    base_args: argparse.Namespace, megatron_config_path: str | None, role: str
) -> argparse.Namespace:
    """A copy of `base_args` for one role, with the overrides of the YAML file.

        megatron:
          - name: default
            role: critic
            overrides: {lr: 1.0e-5, load: /critic}

    A role without an entry inherits everything. A critic has no KL penalty, no teacher, no advantage function of the
    user and an output layer of its own.

    Raises:
        ConfigError: the file is broken, or has an unknown role, key or setting, or two entries for one role.
    """
    if role not in ROLES:
        raise ConfigError(f"unknown role {role!r}: expected {' or '.join(ROLES)}")
    args = copy.deepcopy(base_args)
    if role == "critic":
        vars(args).update(_CRITIC)
    if megatron_config_path is not None:
        vars(args).update(_overrides(megatron_config_path).get(role, {}))
    return args


def _overrides(path: str) -> dict[str, dict[str, Any]]:
    """The settings of each role that has an entry."""
    problems = Problems()
    content = load_yaml_mapping(path)
    entries = content.get("megatron")
    if not isinstance(entries, list) or set(content) != {"megatron"}:
        raise ConfigError(f"{path} must hold one list, `megatron`, of entries with role and overrides")
    by_role: dict[str, dict[str, Any]] = {}
    for position, entry in enumerate(entries):
        where = f"{path}: megatron[{position}]"
        if not isinstance(entry, dict) or entry.get("role", "actor") not in ROLES:
            problems.add(f"{where} must be a mapping with role: actor or critic")
            continue
        for key in set(entry) - set(_ENTRY_KEYS):
            problems.add(f"{where}: unknown key {key!r}{suggestion(str(key), _ENTRY_KEYS)}")
        role = entry.get("role", "actor")
        if role in by_role:
            problems.add(f"{where}: a second entry for role {role}")
        settings = entry.get("overrides", entry.get("args")) or {}
        by_role[role] = _convert(settings, where, problems)
    problems.raise_if_any()
    return by_role


def _convert(settings: dict[str, Any], where: str, problems: Problems) -> dict[str, Any]:
    table = flag_table()
    converted = {}
    for key, value in settings.items():
        dest = str(key).replace("-", "_")
        entry = table.by_dest.get(dest)
        if entry is None:
            problems.add(f"{where}: unknown setting {key!r}{suggestion(dest, table.by_dest)}")
            continue
        try:
            converted[dest] = convert_value(entry, value)
        except ConfigError as error:
            problems.found += [f"{where}: {problem}" for problem in error.problems]
    return converted
