"""Flags of megatron-core's config dataclasses, read from the installed source.

Written for megatron-core 0.16.1: the fields of TransformerConfig (with ModelParallelConfig), MLATransformerConfig,
OptimizerConfig and DistributedDataParallelConfig. A contract test compares what is read here with
`dataclasses.fields` of the imported classes.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from typing import Any

from slime.utils.arguments.errors import ConfigError
from slime.utils.arguments.flag import Flag, Parser
from slime.utils.arguments.megatron_names import (
    DEFAULT_OF_ATTRIBUTE,
    FIELDS_WITHOUT_FLAG,
    FLAGS_OF_ATTRIBUTE,
    TYPE_OF_ATTRIBUTE,
    attribute_of,
)
from slime.utils.arguments.source import (
    SourceField,
    Unreadable,
    class_fields,
    find_class,
    literal,
    package_folder,
    parse_file,
)

# class -> its file below megatron/core; a later class only adds fields that earlier ones lack
CONFIG_CLASSES = {
    "ModelParallelConfig": "model_parallel_config.py",
    "TransformerConfig": "transformer/transformer_config.py",
    "MLATransformerConfig": "transformer/transformer_config.py",
    "OptimizerConfig": "optimizer/optimizer_config.py",
    "DistributedDataParallelConfig": "distributed/distributed_data_parallel_config.py",
}
_GROUPS = {
    "ModelParallelConfig": "Megatron: parallelism",
    "TransformerConfig": "Megatron: transformer",
    "MLATransformerConfig": "Megatron: multi-latent attention",
    "OptimizerConfig": "Megatron: optimiser",
    "DistributedDataParallelConfig": "Megatron: data parallelism",
}
_SCALARS: dict[str, Parser | type] = {"int": int, "float": float, "str": str, "bool": bool}
_ENUM_DEFAULTS = {"AttnBackend.auto": "auto"}
_ENUM_CHOICES = {"AttnBackend": ("flash", "fused", "unfused", "local", "auto")}
_DTYPE_CHOICES = ("fp32", "bf16", "fp16", "fp8")


@functools.cache
def source_fields() -> dict[str, tuple[SourceField, ...]]:
    """The fields that each config class declares itself, in order.

    Raises:
        ConfigError: megatron-core isn't installed, or its sources aren't laid out as in 0.16.1.
    """
    folder = package_folder("megatron.core")
    if folder is None:
        raise ConfigError("megatron-core is not installed: pip install megatron-core==0.16.1")
    try:
        return {name: _fields_of(folder / path, name) for name, path in CONFIG_CLASSES.items()}
    except Unreadable as error:
        raise ConfigError(f"megatron-core isn't laid out as in 0.16.1, which this was written for: {error}") from error


@functools.cache
def megatron_config_flags() -> tuple[Flag, ...]:
    """One flag per field that a user may set."""
    flags: dict[str, Flag] = {}
    for class_name, fields in source_fields().items():
        for field in fields:
            attribute = attribute_of(field.name)
            if field.name not in FIELDS_WITHOUT_FLAG and attribute not in flags:
                flags[attribute] = _flag_of(field, attribute, _GROUPS[class_name])
    return tuple(flags.values())


def _fields_of(path: Path, class_name: str) -> tuple[SourceField, ...]:
    return tuple(class_fields(find_class(parse_file(path), class_name, path)))


def _flag_of(field: SourceField, attribute: str, group: str) -> Flag:
    parser, choices, nargs = _value_type(field, attribute)
    default = DEFAULT_OF_ATTRIBUTE[attribute] if attribute in DEFAULT_OF_ATTRIBUTE else _default(field)
    if parser is bool:
        names, off_names = _switch_spellings(attribute)
        return Flag(attribute, bool, default, field.doc, names, off_names, group=group)
    names = FLAGS_OF_ATTRIBUTE.get(attribute, (_spelling(attribute),))
    return Flag(attribute, parser, default, field.doc, names, (), choices, nargs, group=group)


def _switch_spellings(attribute: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    plain = _spelling(attribute)
    names = FLAGS_OF_ATTRIBUTE.get(attribute, (plain, f"--no-{plain[2:]}"))
    off = tuple(name for name in names if name.startswith(("--no-", "--disable-")) and name != plain)
    on = tuple(name for name in names if name not in off)
    return on or (plain,), off or (f"--no-{plain[2:]}",)


def _value_type(field: SourceField, attribute: str) -> tuple[Parser | type, tuple[Any, ...] | None, str | None]:
    """How the text of a value is read: (parser, choices, nargs)."""
    if attribute in TYPE_OF_ATTRIBUTE:
        parser, nargs = TYPE_OF_ATTRIBUTE[attribute]
        return parser, None, nargs
    annotation = _without_optional(field.annotation)
    text = ast.unparse(annotation)
    if text in _SCALARS:
        return _SCALARS[text], None, None
    if text in _ENUM_CHOICES:
        return str, _ENUM_CHOICES[text], None
    if text == "torch.dtype":
        return str, _DTYPE_CHOICES, None
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Literal":
        values = literal(annotation.slice)
        return str, tuple(values) if isinstance(values, tuple) else (values,), None
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) in ("list", "List"):
        return _SCALARS[ast.unparse(annotation.slice)], None, "+"
    raise ConfigError(
        f"megatron-core's config field {field.name}: {text} has a type that this was not written for (0.16.1 was)"
    )


def _without_optional(annotation: ast.expr) -> ast.expr:
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Optional":
        return annotation.slice
    return annotation


def _default(field: SourceField) -> Any:
    value = field.value
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "field":
        keywords = {keyword.arg: keyword.value for keyword in value.keywords}
        if "default_factory" in keywords:
            return []
        value = keywords["default"]
    text = ast.unparse(value) if value is not None else "None"
    if text in _ENUM_DEFAULTS:
        return _ENUM_DEFAULTS[text]
    if text.startswith("torch."):
        return {"torch.float32": "fp32"}[text]
    return literal(value)


def _spelling(attribute: str) -> str:
    return "--" + attribute.replace("_", "-")
