"""The vision tower: transformers' own module. Written for transformers 5.19."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def read_vision_config(hf_checkpoint: str | Path) -> Any:
    """The whole config of a checkpoint with a tower (`vision_config`, `text_config`, `image_token_id`)."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(hf_checkpoint)


def build_tower(config: Any) -> torch.nn.Module:
    """The tower of a config, with random weights; `tower(pixel_values, grid_thw=...)` gives `pooler_output`.

    Raises:
        TypeError: it is none that slime knows to keep exact in 16 bit.
    """
    from transformers import AutoModel

    tower = AutoModel.from_config(config.vision_config, attn_implementation="sdpa")
    rotary = getattr(tower, "rotary_pos_emb", None)
    if not hasattr(rotary, "compute_axial_rope_parameters"):
        raise TypeError(f"{type(tower).__name__}: its rotary embedding is not the one of transformers 5.19")
    return tower


def features_of_images(tower: Any, pixel_values: torch.Tensor, grid_thw: torch.Tensor) -> torch.Tensor:
    """[features, hidden size of the text model], image after image."""
    keep_frequencies_exact(tower)
    return tower(pixel_values, grid_thw=grid_thw).pooler_output


def keep_frequencies_exact(tower: Any) -> None:
    """Rotary frequencies in float32 again, which a conversion of the model to 16 bit has rounded."""
    rotary = tower.rotary_pos_emb
    if rotary.inv_freq.dtype != torch.float32:
        frequencies, _ = rotary.compute_axial_rope_parameters(tower.config)
        rotary.inv_freq = frequencies.to(rotary.inv_freq.device)
