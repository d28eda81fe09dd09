"""Settings that differ between actor and critic (`--megatron-config-path`)."""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

from slime.utils.arguments.errors import ConfigError, Problems, suggestion
from slime.utils.arguments.rules.loading import is_megatron_checkpoint, saved_iteration
from slime.utils.arguments.table import flag_table
from slime.utils.arguments.yaml_config import convert_value, load_yaml_mapping

ROLES = ("actor", "critic")
_ENTRY_KEYS = ("name", "role", "overrides", "args", "num_nodes", "num_gpus_per_node")
# what a critic never has
_CRITIC = {
    "kl_coef": 0.0,
    "use_kl_loss": False,
    "use_opd": False,
    "custom_advantage_function_path": None,
    "keep_old_actor": False,
    "save_hf": None,
    "lora_rank": None,  # a critic is trained whole
    "lora_save_adapter": None,
    "untie_embeddings_and_output_weights": True,
    "loss_type": "value_loss",
}
CRITIC_FOLDER = "critic"
# the critic trains on the actor's micro-batches and hands its values to the actor's ranks
_SHARED = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
    "virtual_pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage", "data_pad_size_multiplier",
    "global_batch_size", "rollout_batch_size", "n_samples_per_prompt", "num_rollout", "max_tokens_per_gpu",
    "micro_batch_size", "use_dynamic_batch_size", "advantage_estimator", "offload_train",
)  # fmt: skip


def parse_megatron_role_args(
    base_args: argparse.Namespace, megatron_config_path: str | None, role: str
) -> argparse.Namespace:
    """A copy of `base_args` for one role, with the overrides of the YAML file.

        megatron:
          - name: default
            role: critic
            overrides: {lr: 1.0e-5, load: /critic}

    A role without an entry inherits everything. A critic has no KL penalty, no teacher, no advantage function of the
    user and an output layer of its own; it loads from and saves to the folder `critic` below the actor's `load` and
    `save` unless its entry says otherwise.

    Raises:
        ConfigError: the file is broken, or has an unknown role, key or setting, or two entries for one role.
    """
    if role not in ROLES:
        raise ConfigError(f"unknown role {role!r}: expected {' or '.join(ROLES)}")
    args = copy.deepcopy(base_args)
    overrides = {} if megatron_config_path is None else _overrides(megatron_config_path).get(role, {})
    if role == "critic":
        vars(args).update(_CRITIC)
        _resolve_critic_folders(args, base_args)
    if "load" in overrides:
        args.finetune = args.no_load_optim = args.no_load_rng = not is_megatron_checkpoint(overrides["load"])
        args.ckpt_step = None
    vars(args).update(overrides)
    return args


def _resolve_critic_folders(args: argparse.Namespace, actor: argparse.Namespace) -> None:
    """Where the critic's weights come from and go to.

    Where the run resumes and the folder below has a checkpoint, the critic goes on from it, at the actor's iteration
    (in critic-only rollouts the actor has none yet). Else it takes the actor's first weights with a new value head.
    """
    if actor.save is not None:
        args.save = str(Path(actor.save) / CRITIC_FOLDER)
    if actor.keep_checkpoints is not None:
        # it goes on at the actor's iteration, and the actor's saves end up to two behind its own
        args.keep_checkpoints = actor.keep_checkpoints + 2
    own = None if actor.resume_folder is None else str(Path(actor.resume_folder) / CRITIC_FOLDER)
    if not is_megatron_checkpoint(own):
        args.load, args.ckpt_step = actor.ref_load or actor.hf_checkpoint, actor.ref_ckpt_step
        args.finetune = args.no_load_optim = args.no_load_rng = True
        return
    args.load = own
    if not actor.finetune:
        args.ckpt_step = saved_iteration(actor.load) if actor.ckpt_step is None else actor.ckpt_step
    else:
        args.ckpt_step = None
        args.finetune = args.no_load_optim = args.no_load_rng = False


def roles_with_entries(path: str) -> list[str]:
    """The roles that the YAML file has settings for; ConfigError if it is broken."""
    return list(_overrides(path))


def check_role_args(base: argparse.Namespace, args: argparse.Namespace, role: str) -> None:
    """ConfigError if a role differs from the run in what both roles must share, or would overwrite the other's
    checkpoints."""
    problems = Problems()
    for dest in _SHARED:
        if getattr(args, dest, None) != getattr(base, dest, None):
            problems.add(f"--megatron-config-path: {dest} can't differ between roles (here for role {role})")
    if role == "critic" and args.lora_rank is not None:
        problems.add("--megatron-config-path: lora_rank can't be set for role critic: a critic is trained whole")
    if role == "critic" and args.save is not None and args.save == base.save:
        problems.add(f"--megatron-config-path: actor and critic would both save to {args.save}")
    problems.raise_if_any()


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
