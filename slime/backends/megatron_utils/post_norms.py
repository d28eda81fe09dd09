"""Layers with a norm after the attention, after the MLP, or both (GLM-4): what each adds to the residual is normed.

Written for megatron-core 0.16.1, whose `TransformerLayer` has norms in front of them only. It adds each block's output
to the residual with a function from its spec (`self_attn_bda`, `mlp_bda`); that is where the norm goes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

AddToResidual = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]


def add_post_norms(block: TransformerBlockSubmodules, *, attention: bool, mlp: bool) -> TransformerBlockSubmodules:
    """`block` with norms of its own kind after the attention and after the MLP of each layer, as asked.

    Raises:
        TypeError: a layer of the spec is not Megatron's `TransformerLayer`.
    """
    layers = []
    for layer in block.layer_specs:
        if layer.module is not TransformerLayer:
            raise TypeError(f"post norms go with TransformerLayer, the spec has {layer.module}")
        layer = copy.copy(layer)
        layer.module = PostNormTransformerLayer
        layer.params = {**layer.params, "norm": block.layer_norm, "after_attention": attention, "after_mlp": mlp}
        layers.append(layer)
    block = copy.copy(block)
    block.layer_specs = layers
    return block


class PostNormTransformerLayer(TransformerLayer):
    """residual + norm(attention(...)), residual + norm(mlp(...)).

    The norms are `post_self_attn_layernorm` and `post_mlp_layernorm`, of the module `norm`.
    """

    def __init__(self, *args: Any, norm: Any, after_attention: bool, after_mlp: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for wanted, name, adder in (
            (after_attention, "post_self_attn_layernorm", "self_attn_bda"),
            (after_mlp, "post_mlp_layernorm", "mlp_bda"),
        ):
            if not wanted:
                continue
            module = build_module(
                norm, config=self.config, hidden_size=self.config.hidden_size, eps=self.config.layernorm_epsilon
            )
            setattr(self, name, module)
            setattr(self, adder, _norm_first(module, getattr(self, adder)))


def _norm_first(norm: nn.Module, get_adder: Callable[[bool, bool], AddToResidual]) -> Any:
    """Megatron's `get_bias_dropout_add` with a norm before dropout and addition."""

    def get(training: bool, fused: bool) -> AddToResidual:
        add = get_adder(training, fused)

        def normed(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
            x, bias = x_with_bias
            return add((norm(x if bias is None else x + bias), None), residual, dropout)

        return normed

    return get
