"""Qwen3-Next's layers for `--spec`; without `--spec` slime builds the same ones."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig


def get_qwen3_next_spec(
    args: Namespace, config: TransformerConfig, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """The decoder block of this pipeline stage."""
    from slime.backends.megatron_utils.layer_spec import decoder_block_spec

    return decoder_block_spec(args, config, vp_stage)
