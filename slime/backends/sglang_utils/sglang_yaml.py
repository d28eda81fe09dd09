"""Reads the YAML file of --sglang-config: models and their server groups."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from slime.backends.sglang_utils.sglang_config import ModelConfig, ServerGroupConfig, SglangConfig
from slime.utils.arguments.errors import ConfigError, Problems, suggestion
from slime.utils.arguments.yaml_config import load_yaml_mapping

ROOT = "sglang"
MODEL_KEYS = ("name", "model_path", "update_weights", "num_gpus_per_engine", "server_groups")
GROUP_KEYS = ("worker_type", "num_gpus", "num_gpus_per_engine", "overrides")
ALIASES = {"engine_groups": "server_groups"}


def read_sglang_yaml(args: Namespace) -> SglangConfig:
    """The deployment in `args.sglang_config`.

    A model without `model_path` has args.hf_checkpoint, and is the trained one if it has that; a group without
    `num_gpus_per_engine` has its model's, else args.rollout_num_gpus_per_engine.

    Raises:
        ConfigError: with all problems, each naming the file, the model and the group.
    """
    return SglangYaml(args.sglang_config, args).read()


class SglangYaml:
    """One file, and the problems found in it."""

    def __init__(self, path: str, args: Namespace) -> None:
        self._path = path
        self._args = args
        self._problems = Problems()

    def read(self) -> SglangConfig:
        content = load_yaml_mapping(self._path)
        self._check_keys("the file", content, (ROOT,))
        models = [self._model(index, entry) for index, entry in enumerate(self._list("the file", content, ROOT))]
        self._problems.raise_if_any()
        if not models:
            raise ConfigError(f"{self._path}: `{ROOT}:` must list at least one model")
        config = self._built("the file", SglangConfig, models=tuple(model for model in models if model is not None))
        self._problems.raise_if_any()
        assert config is not None
        return config

    def _model(self, index: int, entry: Any) -> ModelConfig | None:
        where = f"model {index}"
        if not isinstance(entry, dict):
            self._add(where, f"must be a mapping, not {entry!r}")
            return None
        entry = {ALIASES.get(key, key): value for key, value in entry.items()}
        if not self._typed(where, entry, "name", str):
            self._add(where, "has no name")
            return None
        where = f"model {entry['name']!r}"
        self._check_keys(where, entry, MODEL_KEYS)
        path = self._typed(where, entry, "model_path", str) or self._args.hf_checkpoint
        trained = self._typed(where, entry, "update_weights", bool)
        size = self._typed(where, entry, "num_gpus_per_engine", int) or self._args.rollout_num_gpus_per_engine
        listed = self._list(where, entry, "server_groups")
        if not listed:
            self._add(where, "has no server_groups")
        groups = [self._group(f"{where}, group {number}", group, size) for number, group in enumerate(listed)]
        if groups and all(group is not None and group.worker_type == "placeholder" for group in groups):
            self._add(where, "has placeholders only")
        self._check_one_path(where, path, groups)
        return self._built(
            where,
            ModelConfig,
            name=entry["name"],
            model_path=path,
            server_groups=tuple(group for group in groups if group is not None),
            update_weights=path == self._args.hf_checkpoint if trained is None else trained,
        )

    def _group(self, where: str, entry: Any, size: int) -> ServerGroupConfig | None:
        if not isinstance(entry, dict):
            self._add(where, f"must be a mapping, not {entry!r}")
            return None
        self._check_keys(where, entry, GROUP_KEYS)
        num_gpus = self._typed(where, entry, "num_gpus", int)
        if num_gpus is None:
            self._add(where, "has no num_gpus")
            return None
        size = self._typed(where, entry, "num_gpus_per_engine", int) or size
        nodes = self._args.num_gpus_per_node
        if size > nodes and size % nodes:
            self._add(where, f"num_gpus_per_engine {size} is no multiple of --num-gpus-per-node {nodes}")
        return self._built(
            where,
            ServerGroupConfig,
            num_gpus=num_gpus,
            num_gpus_per_engine=size,
            worker_type=self._typed(where, entry, "worker_type", str) or "regular",
            overrides=self._overrides(where, entry),
        )

    def _overrides(self, where: str, entry: dict[str, Any]) -> dict[str, Any]:
        """The overrides; each must be a `ServerArgs` field, where SGLang is installed."""
        from slime.utils.arguments.sglang_flags import NOT_EXPOSED, PREFIX, sglang_flags

        overrides = self._typed(where, entry, "overrides", dict) or {}
        known = {flag.dest.removeprefix(PREFIX) for flag in sglang_flags()}
        for name in overrides if known else ():
            if name not in known | NOT_EXPOSED:
                near = suggestion(str(name), known | NOT_EXPOSED)
                self._add(where, f"overrides: SGLang's ServerArgs has no field {name!r}{near}")
        return overrides

    def _check_one_path(self, where: str, path: str, groups: list[ServerGroupConfig | None]) -> None:
        for group in groups:
            other = None if group is None else group.overrides.get("model_path")
            if other not in (None, path):
                self._add(where, f"has model_path {path}, but a group overrides it with {other}")

    # -----------------------------------------------------------------------------------------------------------------

    def _add(self, where: str, problem: str) -> None:
        self._problems.add(f"{self._path}: {where}: {problem}")

    def _check_keys(self, where: str, entry: dict[str, Any], known: tuple[str, ...]) -> None:
        for key in entry:
            if key not in known:
                self._add(where, f"unknown key {key!r}{suggestion(str(key), known)}; there are {', '.join(known)}")

    def _typed(self, where: str, entry: dict[str, Any], key: str, kind: type) -> Any:
        """The value of a key; None, with a problem where it is there but of another type."""
        value = entry.get(key)
        if value is None or (isinstance(value, kind) and not (kind is int and isinstance(value, bool))):
            return value
        self._add(where, f"{key} must be of type {kind.__name__}, not {value!r}")
        return None

    def _list(self, where: str, entry: dict[str, Any], key: str) -> list[Any]:
        value = entry.get(key)
        if value is None or isinstance(value, list):
            return value or []
        self._add(where, f"{key} must be a list")
        return []

    def _built(self, where: str, kind: type, **fields: Any) -> Any:
        try:
            return kind(**fields)
        except ValueError as error:
            self._add(where, str(error))
            return None
