"""Flags of SGLang's ServerArgs as `--sglang-*`, read from the installed source.

Written for SGLang 0.5.23, which declares each setting once, as a class attribute `name: A[type, Arg(...)] = default`
in `srt/arg_groups/fields/`. Importing ServerArgs takes 8 s and torch; reading the declarations takes 0.05 s. Where the
source is laid out in another way, ServerArgs is imported. A contract test compares both.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

from slime.utils.arguments.argparse_flags import flags_of_parser
from slime.utils.arguments.flag import Flag, Parser, json_value
from slime.utils.arguments.source import SourceField, Unreadable, class_fields, literal, package_folder, parse_file
from slime.utils.misc import load_function

PREFIX = "sglang_"
GROUP = "SGLang server"

# slime sets them, from its own flags
NOT_EXPOSED = frozenset(
    {
        "base_gpu_id",
        "config",
        "dist_init_addr",
        "enable_memory_saver",
        "enable_return_routed_experts",
        "gpu_id_step",
        "host",
        "model_path",
        "nccl_port",
        "nnodes",
        "node_rank",
        "port",
        "random_seed",
        "skip_server_warmup",
        "tp_size",
        "trust_remote_code",
    }
)
# settings that SGLang registers by hand beside the declarations
_BY_HAND = (
    Flag("disable_cuda_graph", bool, False, "switch CUDA graphs off", ("--disable-cuda-graph",)),
    Flag("enable_dp_attention", bool, False, "data-parallel attention", ("--enable-dp-attention",)),
    Flag("enable_flashinfer_allreduce_fusion", bool, False, "", ("--enable-flashinfer-allreduce-fusion",)),
    Flag("reasoning_parser", str, None, "parser of reasoning models", ("--reasoning-parser",)),
    Flag("tool_call_parser", str, None, "parser of tool calls", ("--tool-call-parser",)),
)
_SCALARS: dict[str, Parser | type] = {"int": int, "float": float, "str": str, "bool": bool}


@functools.cache
def sglang_flags() -> tuple[Flag, ...]:
    """One flag per server setting; none where SGLang isn't installed."""
    folder = package_folder("sglang")
    if folder is None:
        return ()
    try:
        flags = declared_flags(folder / "srt" / "arg_groups")
    except Unreadable:
        flags = imported_flags()
    return tuple(_with_prefix(entry) for entry in flags if entry.dest not in NOT_EXPOSED)


def imported_flags() -> list[Flag]:
    """The settings as SGLang's own parser has them (imports SGLang)."""
    server_args = load_function("sglang.srt.server_args.ServerArgs")
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    server_args.add_cli_args(parser)
    return flags_of_parser(parser, GROUP)


def declared_flags(folder: Path) -> list[Flag]:
    """The settings as the source declares them.

    Raises:
        Unreadable: the source isn't laid out as in 0.5.23.
    """
    files = sorted((folder / "fields").glob("[a-z]*.py"))
    names = _module_constants(folder / "choices.py")
    flags = []
    for path in files:
        module = parse_file(path)
        imports = _imported_names(module)
        known = {**names, **_module_constants(path)}
        for node in module.body:
            if isinstance(node, ast.ClassDef):
                fields = (_flag_of(field, known, imports) for field in class_fields(node))
                flags += [entry for entry in fields if entry is not None]
    if not flags:
        raise Unreadable(f"no settings are declared below {folder}")
    return [*flags, *_BY_HAND]


def _flag_of(field: SourceField, names: dict[str, Any], imports: dict[str, str]) -> Flag | None:
    if not (isinstance(field.annotation, ast.Subscript) and ast.unparse(field.annotation.value) == "A"):
        return None
    if not isinstance(field.annotation.slice, ast.Tuple):
        raise Unreadable(f"the declaration of {field.name}")
    annotation, *metadata = field.annotation.slice.elts
    options = _arg_options(metadata)
    if options is None:
        return None
    by_hand = field.name in {entry.dest for entry in _BY_HAND}
    if by_hand or (literal(options.get("no_cli", ast.Constant(False))) and field.name != "sampling_backend"):
        return None
    spelling = literal(options["cli_name"]) if "cli_name" in options else "--" + field.name.replace("_", "-")
    spellings = (spelling, *(literal(options["aliases"]) if "aliases" in options else ()))
    help_text = _text(options.get("help"))
    default = _default(field)
    if "action" in options and ast.unparse(options["action"]).endswith("BooleanOptionalAction"):
        off = tuple(f"--no-{name[2:]}" for name in spellings)
        return Flag(field.name, bool, default, help_text, spellings, off, group=GROUP)
    parser, choices, nargs = _value_type(annotation, options, names, imports)
    if parser is bool:
        return Flag(field.name, bool, default, help_text, spellings, (), group=GROUP)
    bare = literal(options.get("const"))
    return Flag(field.name, parser, default, help_text, spellings, (), choices, nargs, bare=bare, group=GROUP)


def _arg_options(metadata: list[ast.expr]) -> dict[str, ast.expr] | None:
    """The keywords of `Arg(...)`; a bare text is its help; None where the field has neither."""
    for item in metadata:
        if isinstance(item, ast.Call) and ast.unparse(item.func) == "Arg":
            return {keyword.arg: keyword.value for keyword in item.keywords if keyword.arg}
        if isinstance(item, ast.Constant | ast.JoinedStr | ast.BinOp):
            return {"help": item}
    return None


def _value_type(
    annotation: ast.expr, options: dict[str, ast.expr], names: dict[str, Any], imports: dict[str, str]
) -> tuple[Parser | type, tuple[Any, ...] | None, str | int | None]:
    inner = _without_optional(annotation)
    outer = ast.unparse(inner.value) if isinstance(inner, ast.Subscript) else ""
    choices = _choices(options.get("choices"), names)
    nargs = literal(options["nargs"]) if "nargs" in options else None
    if "action" in options:
        return _lora_path, None, "*"  # the only own action
    named = _parser_named(ast.unparse(options["type_parser"]), imports) if "type_parser" in options else None
    if outer == "Literal":
        values = literal(inner.slice)  # type: ignore[attr-defined]
        values = values if isinstance(values, tuple) else (values,)
        scalar = type(next(value for value in values if value is not None))
        return named or scalar, choices or values, nargs
    if named is not None:
        return named, choices, nargs
    if outer in ("List", "list"):
        return _SCALARS.get(ast.unparse(inner.slice), str), choices, nargs or "+"  # type: ignore[attr-defined]
    return _SCALARS.get(ast.unparse(inner), str), choices, nargs


def _parser_named(name: str, imports: dict[str, str]) -> Parser:
    """SGLang's parser of a value: ours where it is simple, else SGLang is imported when such a flag is given."""
    if name in _PARSERS:
        return _PARSERS[name]
    path = imports.get(name)
    if path is None:
        return str

    def parse(text: str) -> Any:
        return load_function(path)(text)

    parse.__name__ = name
    return parse


def _lora_path(text: str) -> Any:
    return json_value(text) if text.strip().startswith("{") else text


def _human_int(text: str) -> int:
    """An integer with an optional suffix: 16k and 2M are decimal, 16Ki and 2Mi binary."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kMGT])(i?)", text.strip())
    if match is None:
        return int(text)
    number, suffix, binary = match.groups()
    if binary and "." in number:
        raise ValueError("a binary suffix takes no decimals")
    return int(Decimal(number) * (1024 if binary else 1000) ** ("kMGT".index(suffix) + 1))


_PARSERS: dict[str, Parser] = {
    "json.loads": json_value,
    "json_list_type": json_value,
    "human_readable_int": _human_int,
    "nullable_str": lambda text: None if text in ("", "None") else text,
}


def _choices(node: ast.expr | None, names: dict[str, Any]) -> tuple[Any, ...] | None:
    """The choices where they are plain values; None, so that SGLang checks them itself, where they are computed."""
    if node is None:
        return None
    try:
        return tuple(literal(node, names))
    except Unreadable:
        return None


def _default(field: SourceField) -> Any:
    if isinstance(field.value, ast.Call):
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in field.value.keywords}
        if keywords.get("default_factory") == "list":
            return []
        raise Unreadable(f"the default of {field.name}")
    return literal(field.value)


def _text(node: ast.expr | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _without_optional(annotation: ast.expr) -> ast.expr:
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Optional":
        return annotation.slice
    return annotation


def _imported_names(module: ast.Module) -> dict[str, str]:
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in module.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }


def _module_constants(path: Path) -> dict[str, Any]:
    """Module-level names that are plain values, such as lists of choices."""
    constants: dict[str, Any] = {}
    for node in parse_file(path).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                constants[node.targets[0].id] = literal(node.value, constants)
            except Unreadable:
                continue
    return constants


def _with_prefix(entry: Flag) -> Flag:
    return dataclasses.replace(
        entry,
        dest=PREFIX + entry.dest,
        names=tuple(f"--sglang-{name.lstrip('-')}" for name in entry.names),
        off_names=tuple(f"--no-sglang-{name.removeprefix('--no-')}" for name in entry.off_names),
        required=False,
        group=GROUP,
    )
