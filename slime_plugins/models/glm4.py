"""GLM-4's layer spec by name: `--spec slime_plugins.models.glm4 get_glm_spec`, as launch scripts of slime give it.

slime builds the same without it: `--post-self-attn-layernorm --post-mlp-layernorm`, or `--hf-checkpoint` alone.
"""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules


def get_glm_spec(
    args: Namespace, config: TransformerConfig, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """The decoder block of this pipeline stage, with norms after the attention and after the MLP."""
    from slime.backends.megatron_utils.post_norms import add_post_norms
    from slime.utils.accelerator import current

    return add_post_norms(current().layer_spec(config, vp_stage=vp_stage), attention=True, mlp=True)
