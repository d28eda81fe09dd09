"""Core attention for Megatron layer specs on a CPU, on torch's scaled_dot_product_attention.

It takes padded batches (sbhd) and packed sequences (thd), grouped queries, and context parallelism; the stock local
attention has neither packed sequences nor context parallelism. Written for megatron-core 0.16.1.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from slime.backends.megatron_utils.cpu.context_parallel import GatherChunks, in_sequence_order, zigzag_attention
from slime.backends.megatron_utils.cpu.sequence_batches import plan_batches

_CAUSAL = {AttnMaskType.causal: True, AttnMaskType.padding_causal: True, AttnMaskType.no_mask: False}


class SdpaCoreAttention(MegatronModule):
    """Drop-in for `DotProductAttention` in a layer spec.

    Raises:
        ValueError: the config asks for attention that this module does not compute (windows, attention sinks).
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        if config.window_size is not None:
            raise ValueError(f"attention windows ({config.window_size}) are not supported on the CPU")
        if getattr(config, "softmax_type", "vanilla") != "vanilla":
            raise ValueError(f"softmax_type {config.softmax_type!r} is not supported on the CPU")
        self.layer_number = layer_number
        self.attn_mask_type = attn_mask_type
        self.softmax_scale = softmax_scale
        self.attention_dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.cp_group = getattr(pg_collection, "cp", None) or parallel_state.get_context_parallel_group()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: [s, b, heads, d], or packed [t, heads, d] with `packed_seq_params`; s and t are this rank's tokens
                under context parallelism.
            key, value: the same with kv heads.
            attention_mask: ignored, the mask follows from the mask type.

        Returns:
            [s, b, heads * d_v], or packed [t, heads * d_v].

        Raises:
            ValueError: a mask type or bias that is not supported, or tokens that `packed_seq_params` does not cover.
        """
        mask_type = attn_mask_type or self.attn_mask_type
        if mask_type not in _CAUSAL or attention_bias is not None:
            raise ValueError(f"attention on the CPU is causal or full, without a bias; not {mask_type}")
        if packed_seq_params is not None:
            out = self._packed(query, key, value, packed_seq_params, _CAUSAL[mask_type])
            return out.flatten(1)
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        if self.cp_group.size() > 1:  # gather wants the ranks' dimension first, sequences second
            key, value = self._whole(key), self._whole(value)
        return self._attend(query, key, value, _CAUSAL[mask_type]).transpose(0, 1).flatten(2)

    def _packed(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: PackedSeqParams, causal: bool
    ) -> torch.Tensor:
        cp = self.cp_group.size()
        bounds = params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded
        lengths = tuple(n // cp for n in bounds.diff().tolist())
        if sum(lengths) != query.size(0):
            raise ValueError(
                f"the pack has {query.size(0)} tokens on this rank, its cu_seqlens {sum(lengths)} (cp={cp})"
            )
        plan = plan_batches(lengths, fill=causal and cp == 1)
        if cp > 1:
            key, value = (GatherChunks.apply(x, self.cp_group).transpose(0, 1) for x in (key, value))  # [t, cp, h, d]
        outputs = []
        for batch in plan.batches:
            q, k, v = batch.take(query), batch.take(key), batch.take(value)
            if cp > 1:
                k, v = (in_sequence_order(x.movedim(2, 0)) for x in (k, v))
            outputs.append(self._attend(q, k, v, causal))
        return plan.join(outputs)

    def _whole(self, local: torch.Tensor) -> torch.Tensor:
        return in_sequence_order(GatherChunks.apply(local, self.cp_group))

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool) -> torch.Tensor:
        """[n, s, heads, d] → [n, s, heads, d_v]."""
        scale = self.softmax_scale if self.softmax_scale is not None else 1.0 / math.sqrt(query.size(-1))
        dropout = self.attention_dropout if self.training else 0.0
        if self.cp_group.size() > 1:
            return zigzag_attention(query, key, value, self.cp_group, causal=causal, scale=scale, dropout=dropout)
        out = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            is_causal=causal,
            scale=scale,
            enable_gqa=query.size(2) != key.size(2),
            dropout_p=dropout,
        )
        return out.transpose(1, 2)
