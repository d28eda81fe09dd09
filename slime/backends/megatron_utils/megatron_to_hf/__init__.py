"""Megatron weights -> Hugging Face tensors."""

from __future__ import annotations

import argparse

from torch import Tensor

from slime.backends.megatron_utils.families import ModelShape, get_family

__all__ = ["convert_to_hf"]


def convert_to_hf(
    args: argparse.Namespace, model_type: str, name: str, param: Tensor, *, shape: ModelShape | None = None
) -> list[tuple[str, Tensor]]:
    """Named Hugging Face tensors of one full (gathered) Megatron weight.

    `name` is its global name, with or without the wrappers' `module.` prefixes; the vocabulary's padding rows are cut.

    Raises:
        ValueError: no table for `model_type`.
        KeyError: the table has no such weight.
    """
    from slime.backends.megatron_utils.arguments import transformer_config_from_args
    from slime.backends.megatron_utils.families import shape_from_model
    from slime.backends.megatron_utils.update_weight.common import strip_param_name_prefix

    shape = shape or shape_from_model(args, transformer_config_from_args(args))
    bound = get_family(model_type).bind(strip_param_name_prefix(name), shape.num_layers)
    return bound.to_hf(param, shape)
