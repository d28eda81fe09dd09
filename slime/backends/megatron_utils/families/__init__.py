"""Model families: one declarative table each, which drives Hugging Face -> Megatron and Megatron -> Hugging Face.

To add a family, write its table in a file here and list it in `FAMILIES`.
"""

from __future__ import annotations

import json
from pathlib import Path

from slime.backends.megatron_utils.families.layout import ModelShape, shape_from_model
from slime.backends.megatron_utils.families.llama import LLAMA
from slime.backends.megatron_utils.families.qwen import QWEN2, QWEN3, QWEN3_MOE
from slime.backends.megatron_utils.families.table import BoundWeight, Family, Weight

FAMILIES: dict[str, Family] = {
    model_type: family for family in (QWEN2, QWEN3, QWEN3_MOE, LLAMA) for model_type in family.model_types
}


def get_family(model_type: str) -> Family:
    """The family of a Hugging Face `model_type`; ValueError lists the known ones."""
    family = FAMILIES.get(model_type)
    if family is None:
        raise ValueError(f"model_type {model_type!r} has no weight table; known: {', '.join(sorted(FAMILIES))}")
    return family


def family_of_checkpoint(path: str | Path) -> Family:
    """The family that the `config.json` of a Hugging Face directory names."""
    return get_family(read_hf_config(path).get("model_type", ""))


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
    "get_family",
    "read_hf_config",
    "shape_from_model",
]
