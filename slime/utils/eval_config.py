"""Evaluation data sets: each with its own keys, sampling and reward; entry > defaults > flags."""

from __future__ import annotations

import difflib
import functools
import json
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass
class EvalDatasetConfig:
    """One data set to evaluate on. None leaves a sampling value to the engine."""

    name: str
    path: str
    rm_type: str | None = None
    custom_rm_path: str | None = None
    input_key: str = "input"
    label_key: str | None = None
    tool_key: str | None = None
    metadata_key: str = "metadata"
    multimodal_keys: dict[str, str] | None = None
    apply_chat_template: bool = False
    apply_chat_template_kwargs: dict[str, Any] | None = None
    n_samples_per_eval_prompt: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_response_len: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_new_tokens: int | None = None
    repetition_penalty: float | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    custom_generate_function_path: str | None = None
    metadata_overrides: dict[str, Any] = field(default_factory=dict)

    @property
    def cache_key(self) -> tuple[Any, ...]:
        """What decides the prompts: equal keys may share one loaded data set."""
        options = {"multimodal": self.multimodal_keys, "template": self.apply_chat_template_kwargs}
        return (
            self.name,
            self.path,
            self.input_key,
            self.label_key,
            self.tool_key,
            self.metadata_key,
            self.apply_chat_template,
            json.dumps(options, sort_keys=True, default=str),
        )

    def inject_metadata(self, sample_metadata: Any) -> dict[str, Any]:
        """A sample's metadata with this data set's overrides and rm type."""
        metadata = {**(sample_metadata or {}), **self.metadata_overrides}
        if self.rm_type is not None:
            metadata["rm_type"] = self.rm_type
        return metadata


# Field → the flags that it falls back to, in order. Rewards and generate functions fall back at each sample.
FLAG_FALLBACKS: dict[str, tuple[str, ...]] = {
    "input_key": ("eval_input_key", "input_key"),
    "label_key": ("eval_label_key", "label_key"),
    "tool_key": ("eval_tool_key", "tool_key"),
    "metadata_key": ("metadata_key",),
    "multimodal_keys": ("multimodal_keys",),
    "apply_chat_template": ("apply_chat_template",),
    "apply_chat_template_kwargs": ("apply_chat_template_kwargs",),
    "n_samples_per_eval_prompt": ("n_samples_per_eval_prompt",),
    "temperature": ("eval_temperature", "rollout_temperature"),
    "top_p": ("eval_top_p", "rollout_top_p"),
    "top_k": ("eval_top_k", "rollout_top_k"),
    "max_response_len": ("eval_max_response_len", "rollout_max_response_len"),
    "stop": ("rollout_stop",),
    "stop_token_ids": ("rollout_stop_token_ids",),
    "min_new_tokens": ("eval_min_new_tokens",),
    "skip_special_tokens": ("rollout_skip_special_tokens",),
}
ENTRY_KEYS = tuple(item.name for item in fields(EvalDatasetConfig))
DEFAULT_KEYS = tuple(key for key in ENTRY_KEYS if key not in ("name", "path"))


def pick_from_args(args: Any, attrs: tuple[str, ...]) -> Any:
    """The first of the attributes that is set."""
    return next((value for name in attrs if (value := getattr(args, name, None)) is not None), None)


def ensure_dataset_list(config: Any) -> list[dict[str, Any]]:
    """The `datasets` of an eval YAML as list of entries; it may be a mapping from name to entry.

    Raises:
        ValueError: it is neither, or an entry isn't a mapping.
    """
    if config is None:
        return []
    if isinstance(config, Mapping):
        config = [{"name": name, **_entry(name, entry)} for name, entry in config.items()]
    if isinstance(config, (str, bytes)) or not isinstance(config, Iterable):
        raise ValueError(f"eval datasets must be a list or a mapping, got {type(config).__name__}")
    return [dict(_entry(number, entry)) for number, entry in enumerate(config)]


def _entry(name: Any, entry: Any) -> Mapping[str, Any]:
    if isinstance(entry, str):
        return {"path": entry}
    if not isinstance(entry, Mapping):
        raise ValueError(f"eval dataset {name}: an entry must be a mapping, got {type(entry).__name__}")
    return entry


def resolve_eval_datasets(args: Any) -> list[EvalDatasetConfig]:
    """The data sets of `args.eval_datasets` where it is set, else of --eval-config (YAML), else --eval-prompt-data.

    Raises:
        ValueError: see `build_eval_dataset_configs`.
    """
    if getattr(args, "eval_datasets", None) is not None:
        return args.eval_datasets
    if getattr(args, "eval_config", None):
        config = read_eval_yaml(args.eval_config)
        return build_eval_dataset_configs(args, ensure_dataset_list(config["datasets"]), config["defaults"])
    values = getattr(args, "eval_prompt_data", None) or []
    names = ["aime", *values] if len(values) == 1 else values
    pairs = zip(names[::2], names[1::2], strict=True)
    return build_eval_dataset_configs(args, [{"name": name, "path": path} for name, path in pairs], {})


def read_eval_yaml(path: str) -> dict[str, Any]:
    """{"datasets", "defaults"} of an eval YAML; its root key `eval` is optional.

    Raises:
        ValueError: another key, or no mapping; names the file.
    """
    import yaml

    with open(path, encoding="utf-8") as file:
        content = yaml.safe_load(file) or {}
    if isinstance(content, Mapping) and set(content) == {"eval"}:
        content = content["eval"] or {}
    if not isinstance(content, Mapping):
        raise ValueError(f"{path}: expected a mapping with datasets and defaults")
    _check_keys(path, content, ("datasets", "defaults"))
    return {"datasets": content.get("datasets"), "defaults": content.get("defaults") or {}}


def build_eval_dataset_configs(
    args: Any, raw_config: Iterable[dict[str, Any]], defaults: dict[str, Any]
) -> list[EvalDatasetConfig]:
    """Complete the entries from the defaults, then the flags.

    Raises:
        ValueError: an unknown key (with the nearest and all valid ones), a missing name or path, a name twice, a
            value of another type or out of range.
    """
    defaults = dict(defaults or {})
    _check_keys("eval defaults", defaults, DEFAULT_KEYS)
    configs: list[EvalDatasetConfig] = []
    for entry in ensure_dataset_list(raw_config):
        where = f"eval dataset {entry.get('name')!r}"
        _check_keys(where, entry, ENTRY_KEYS)
        for key in ("name", "path"):
            if not entry.get(key):
                raise ValueError(f"{where}: {key} is missing")
        if any(config.name == entry["name"] for config in configs):
            raise ValueError(f"{where}: the name is there twice")
        values = {key: pick_from_args(args, flags) for key, flags in FLAG_FALLBACKS.items()}
        values = {key: value for key, value in values.items() if value is not None}
        given = defaults | entry
        if isinstance(given.get("stop"), str):
            given["stop"] = [given["stop"]]
        _check_values(where, given)
        config = EvalDatasetConfig(**(values | given))
        configs.append(config)
    return configs


def _check_keys(where: str, given: Mapping[str, Any], valid: tuple[str, ...]) -> None:
    for key in given:
        if key not in valid:
            near = difflib.get_close_matches(str(key), valid, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{where}: unknown key {key!r}{hint} (valid: {', '.join(valid)})")


_AT_LEAST = {"n_samples_per_eval_prompt": 1, "max_response_len": 1, "temperature": 0, "min_new_tokens": 0}


def _check_values(where: str, given: Mapping[str, Any]) -> None:
    for key, value in given.items():
        hint = _hints()[key]
        if not _fits(value, hint):
            kind = hint.__name__ if typing.get_origin(hint) is None and isinstance(hint, type) else str(hint)
            raise ValueError(f"{where}: {key} must be {kind}, got {value!r} ({type(value).__name__})")
        if key in _AT_LEAST and value is not None and value < _AT_LEAST[key]:
            raise ValueError(f"{where}: {key} must be at least {_AT_LEAST[key]}, got {value}")
        if key == "top_p" and value is not None and not 0 < value <= 1:
            raise ValueError(f"{where}: top_p must be above 0 and at most 1, got {value}")


@functools.cache
def _hints() -> dict[str, Any]:
    return typing.get_type_hints(EvalDatasetConfig)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of an annotated type: plain classes, unions, list[X] and dict[str, X] of them."""
    if hint is Any:
        return True
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        return any(_fits(value, option) for option in inner)
    if origin is list:
        return isinstance(value, list) and all(_fits(item, inner[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(isinstance(k, str) and _fits(v, inner[1]) for k, v in value.items())
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    return isinstance(value, hint)
