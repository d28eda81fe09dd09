"""A GPT model whose multi-token-prediction layers are trained beside it. Written for megatron-core 0.16.1.

Megatron's own model computes their loss only where it also computes the main loss, from labels; a policy loss needs
the logits. So this one hands out the logits of both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
)
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class MultiTokenGPTModel(GPTModel):
    """`GPTModel` that keeps the logits of its multi-token-prediction layers from each training pass.

    Layer k (from 1) at token i sees the hidden state of token i and the embedding of token i + k, and predicts token
    i + k + 1 (DeepSeek-V3, arXiv:2412.19437 §2.2). Hidden states, embeddings and output layer are detached: the
    layers learn to follow the policy, and what the policy learns does not depend on them. Passes without gradients,
    and models whose layers are frozen, leave the layers out.
    """

    _ahead: list[Tensor] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.mtp_process and not self.pre_process and self.share_embeddings_and_output_weights:
            # The stage has the embedding itself; Megatron allocates a second copy, which its checkpoints refuse.
            self.output_layer.register_parameter("weight", None)

    def take_logits_ahead(self) -> list[Tensor] | None:
        """Per layer, [1, packed length, vocabulary / tensor-parallel size] of the last pass; None if it made none.

        They are handed out once, so that the graph behind them does not outlive the step.
        """
        ahead, self._ahead = self._ahead, None
        return ahead

    def freeze_prediction_layers(self) -> None:
        """Leave the layers as they are (`--mtp-num-layers` without `--enable-mtp-training`)."""
        if self.mtp_process:
            self.mtp.requires_grad_(False)

    def _postprocess(
        self,
        hidden_states: Tensor,
        input_ids: Tensor,
        position_ids: Tensor | None,
        labels: None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        if labels is not None:
            raise ValueError("MultiTokenGPTModel gives logits, no loss: it takes no labels")
        if not self.post_process:
            return hidden_states
        if self.mtp_process and self.training and torch.is_grad_enabled() and self._trains_layers():
            self._ahead = self._predict_ahead(hidden_states, input_ids, position_ids, *args, **kwargs)
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        return self._logits(hidden_states, weight)

    def _trains_layers(self) -> bool:
        return next(self.mtp.parameters()).requires_grad

    def _predict_ahead(
        self,
        hidden_states: Tensor,
        input_ids: Tensor,
        position_ids: Tensor | None,
        rotary_pos_emb: Tensor | None,
        rotary_pos_cos: Tensor | None,
        rotary_pos_sin: Tensor | None,
        *,
        attention_mask: Tensor | None = None,
        packed_seq_params: Any = None,
        sequence_len_offset: Tensor | None = None,
        extra_block_kwargs: dict[str, Any] | None = None,
        **_: Any,
    ) -> list[Tensor]:
        outputs = self.mtp(
            input_ids=input_ids,
            position_ids=torch.zeros_like(input_ids) if position_ids is None else position_ids,
            # a leaf that requires a gradient: recomputed layers get theirs only if one of their inputs does
            hidden_states=hidden_states.detach().requires_grad_(),
            attention_mask=attention_mask,
            rotary_pos_emb=rotary_pos_emb,
            rotary_pos_cos=rotary_pos_cos,
            rotary_pos_sin=rotary_pos_sin,
            packed_seq_params=packed_seq_params,
            sequence_len_offset=sequence_len_offset,
            embedding=self._detached_embedding,
            **(extra_block_kwargs or {}),
        )
        shared = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if shared else self.output_layer.weight
        _, *layers = outputs.chunk(1 + self.config.mtp_num_layers, dim=0)
        return [self._logits(layer, weight.detach()) for layer in layers]

    def _detached_embedding(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.embedding(input_ids=input_ids, position_ids=position_ids).detach()

    def _logits(self, hidden_states: Tensor, weight: Tensor | None) -> Tensor:
        logits, _ = self.output_layer(hidden_states, weight=weight)
        return logits.transpose(0, 1).contiguous()


class PackedPredictionLayer(MultiTokenPredictionLayer):
    """A prediction layer that can be recomputed on packed sequences: Megatron's tries to save their boundaries as a
    tensor."""

    def _checkpointed_forward(self, forward_func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        if args or self.config.fp8:
            raise ValueError("recomputation of multi-token-prediction layers: without fp8 only")
        hidden_states, decoder_input = kwargs.pop("hidden_states"), kwargs.pop("decoder_input")

        def run(hidden_states: Tensor, decoder_input: Tensor) -> Tensor:
            return forward_func(hidden_states=hidden_states, decoder_input=decoder_input, **kwargs)

        distribute = self.config.distribute_saved_activations
        return tensor_parallel.checkpoint(run, distribute, hidden_states, decoder_input)


def prediction_block_spec(
    config: TransformerConfig, block: TransformerBlockSubmodules, vp_stage: int | None
) -> MultiTokenPredictionBlockSubmodules | None:
    """The spec of the stage's prediction layers; None before the last stage.

    Each is a layer like the decoder's last one, with the decoder's norms, so that it runs where the decoder does.

    Raises:
        TypeError: the decoder's spec is none of a block.
    """
    if not isinstance(block, TransformerBlockSubmodules):
        raise TypeError(f"--mtp-num-layers needs a layer spec of a block, not {type(block).__name__}")
    transformer_engine = config.transformer_impl == "transformer_engine"
    spec = get_gpt_mtp_block_spec(config, block, use_transformer_engine=transformer_engine, vp_stage=vp_stage)
    for layer in spec.layer_specs if spec is not None else ():
        layer.module = PackedPredictionLayer
        norm = block.layer_norm
        layer.submodules.enorm = layer.submodules.hnorm = layer.submodules.layer_norm = norm
    return spec
