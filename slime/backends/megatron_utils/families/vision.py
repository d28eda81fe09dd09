"""The vision tower of Qwen3.5, which Megatron models hold as transformers has it: every tensor is copied."""

from __future__ import annotations

from slime.backends.megatron_utils.families.table import Weight

_BLOCK = "blocks.{layer}."
_MODULES = (
    "patch_embed.proj",
    *(_BLOCK + part for part in ("norm1", "norm2", "attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2")),
    *("merger." + part for part in ("norm", "linear_fc1", "linear_fc2")),
)

VISION_TOWER = (
    Weight("visual.pos_embed.weight", "model.visual.pos_embed.weight"),
    *(
        Weight(f"visual.{module}.{kind}", f"model.visual.{module}.{kind}")
        for module in _MODULES
        for kind in ("weight", "bias")
    ),
)
