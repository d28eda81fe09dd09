"""Model families: one declarative table each, which drives Hugging Face -> Megatron and Megatron -> Hugging Face.

To add a family, write its table in a file here and list it in `FAMILIES`; from outside, see `slime_plugins.models`.
"""

from __future__ import annotations

import json
from pathlib import Path

from slime.backends.megatron_utils.families.deepseek import DEEPSEEK_V3
from slime.backends.megatron_utils.families.glm import GLM4, GLM4_MOE
from slime.backends.megatron_utils.families.layout import ModelShape, shape_from_model
from slime.backends.megatron_utils.families.llama import LLAMA
from slime.backends.megatron_utils.families.mimo import MIMO
from slime.backends.megatron_utils.families.minimax import MINIMAX_M2
from slime.backends.megatron_utils.families.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from slime.backends.megatron_utils.families.qwen_next import QWEN3_5, QWEN3_5_TEXT, QWEN3_NEXT
from slime.backends.megatron_utils.families.table import BoundWeight, Family, Weight
from slime_plugins.models import find_model_plugin

FAMILIES: dict[str, Family] = {
    model_type: family
    for family in (
        DEEPSEEK_V3,
        GLM4,
        GLM4_MOE,
        LLAMA,
        MIMO,
        MINIMAX_M2,
        QWEN2,
        QWEN2_MOE,
        QWEN3,
        QWEN3_MOE,
        QWEN3_NEXT,
        QWEN3_5,
        QWEN3_5_TEXT,
    )
    for model_type in family.model_types
}


def find_family(model_type: str) -> Family | None:
    """The family of a Hugging Face `model_type`: one of slime's, else a plug-in's, else None."""
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    plugin = find_model_plugin(model_type)
    return None if plugin is None else plugin.FAMILY


def get_family(model_type: str) -> Family:
    """The same; ValueError lists the known ones."""
    family = find_family(model_type)
    if family is None:
        raise ValueError(f"model_type {model_type!r} has no weight table; known: {', '.join(sorted(FAMILIES))}")
    return family


def family_of_checkpoint(path: str | Path) -> Family:
    """The family that the `config.json` of a Hugging Face directory names, in the form that its weights have."""
    from slime.backends.megatron_utils.hf_to_megatron.reader import INDEX_FILE, SINGLE_FILE, file_of_each_tensor

    family = get_family(read_hf_config(path).get("model_type", ""))
    has_weights = any((Path(path) / name).is_file() for name in (INDEX_FILE, SINGLE_FILE))
    if family.stacked is not None and has_weights:
        rows = [row for row in family.stacked.weights if row.stacked_experts]
        endings = tuple(name.split("{layer}")[-1] for row in rows for name in row.hf_names)
        if any(name.endswith(endings) for name in file_of_each_tensor(Path(path))):
            return family.stacked
    return family


def read_hf_config(path: str | Path) -> dict:
    config_file = Path(path) / "config.json"
    if not config_file.is_file():
        raise FileNotFoundError(f"{config_file} does not exist: {path} is no Hugging Face model directory")
    return json.loads(config_file.read_text())


__all__ = [
    "FAMILIES",
    "BoundWeight",
    "Family",
    "ModelShape",
    "Weight",
    "family_of_checkpoint",
    "find_family",
    "get_family",
    "read_hf_config",
    "shape_from_model",
]
