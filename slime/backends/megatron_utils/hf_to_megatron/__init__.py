"""Load a Hugging Face directory into a Megatron model under any parallel layout."""

from __future__ import annotations

import json
from pathlib import Path

from slime.backends.megatron_utils.hf_to_megatron.loader import load_hf_weights
from slime.backends.megatron_utils.hf_to_megatron.reader import SafetensorReader

__all__ = ["SafetensorReader", "load_hf_weights", "supports_hf_weight_loading"]


def supports_hf_weight_loading(path: str | Path | None) -> bool:
    """Whether `path` is a Hugging Face directory of a model family that has a weight table."""
    from slime.backends.megatron_utils.families import FAMILIES

    config_file = Path(path) / "config.json" if path else None
    return (
        config_file is not None
        and config_file.is_file()
        and (json.loads(config_file.read_text()).get("model_type") in FAMILIES)
    )
