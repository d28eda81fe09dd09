"""Load a Hugging Face directory into a Megatron model under any parallel layout."""

from __future__ import annotations

import json
from pathlib import Path

from slime.backends.megatron_utils.hf_to_megatron.loader import load_hf_weights
from slime.backends.megatron_utils.hf_to_megatron.reader import SafetensorReader

__all__ = ["SafetensorReader", "load_hf_weights", "supports_hf_weight_loading"]


def supports_hf_weight_loading(path: str | Path | None) -> bool:
    """Whether `path` is a Hugging Face directory of a model family that has a weight table."""
    from slime.backends.megatron_utils.families import find_family

    config_file = Path(path) / "config.json" if path else None
    if config_file is None or not config_file.is_file():
        return False
    return find_family(json.loads(config_file.read_text()).get("model_type", "")) is not None
