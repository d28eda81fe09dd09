"""Gated delta net layers of Qwen3-Next and Qwen3.5, over packed sequences and every parallel layout.

megatron-core 0.16.1 has such a layer, without packed sequences and context parallelism, and with a checkpoint layout
that no Hugging Face tensor maps to by moving rows alone (its norm counts from zero).

Rows of the projection and channels of the convolution are grouped by key head: a head's query, key, values, output
gates, write gates, decays. So tensor parallelism cuts between heads, and each rank is a smaller layer of its own.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    get_cuda_rng_tracker,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor

from slime.backends.megatron_utils.cpu.context_parallel import GatherChunks
from slime.backends.megatron_utils.modules.delta_rule import DeltaRuleKernels
from slime.utils.accelerator import current

_CUT_OVER_HEADS = ("conv_weight", "A_log", "dt_bias")


@dataclass(frozen=True)
class GatedDeltaNetSubmodules:
    in_proj: ModuleSpec | type
    out_proj: ModuleSpec | type


class GatedDeltaNet(MegatronModule):
    """Drop-in for `SelfAttention` in a layer spec.

    Raises:
        ValueError: the heads can't be divided over the tensor-parallel ranks.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: GatedDeltaNetSubmodules,
        layer_number: int,
        kernels: DeltaRuleKernels,
        pg_collection: ProcessGroupCollection,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.layer_number, self.kernels = layer_number, kernels
        self.tp_group, self.cp_group = pg_collection.tp, pg_collection.cp
        tp, key_heads, value_heads = self.tp_group.size(), config.linear_num_key_heads, config.linear_num_value_heads
        if key_heads % tp or value_heads % key_heads:
            raise ValueError(f"{key_heads} key heads with {value_heads} value heads can't be divided over {tp} ranks")
        self.key_heads, self.values_per_key = key_heads // tp, value_heads // key_heads
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        self.conv_channels = 2 * self.key_dim + self.values_per_key * self.value_dim  # of each key head
        self._build_projections(submodules)
        local_values = self.key_heads * self.values_per_key
        self.conv_weight = self._parameter(self.key_heads * self.conv_channels, 1, config.linear_conv_kernel_dim)
        self.A_log = self._parameter(local_values)
        self.dt_bias = self._parameter(local_values)
        self.norm_weight = self._parameter(self.value_dim)
        for name in _CUT_OVER_HEADS:
            set_tensor_model_parallel_attributes(getattr(self, name), is_parallel=True, dim=0, stride=1)
        if config.perform_initialization:
            self._initialize()

    def _build_projections(self, submodules: GatedDeltaNetSubmodules) -> None:
        config = self.config
        head_rows = self.conv_channels + self.values_per_key * (self.value_dim + 2)
        linear = {"config": config, "bias": config.add_bias_linear, "is_expert": False, "tp_group": self.tp_group}
        self.in_proj = build_module(
            submodules.in_proj,
            config.hidden_size,
            config.linear_num_key_heads * head_rows,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="qkv",
            **linear,
        )
        self.out_proj = build_module(
            submodules.out_proj,
            config.linear_num_value_heads * self.value_dim,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="proj",
            **linear,
        )

    def _parameter(self, *shape: int) -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.empty(*shape, dtype=self.config.params_dtype, device=current().device()))

    @torch.no_grad()
    def _initialize(self) -> None:
        """As published: decay rates uniform in 0..16 on the scale of exp, step sizes and norm one."""
        with get_cuda_rng_tracker().fork():
            bound = self.conv_weight.shape[-1] ** -0.5
            self.conv_weight.uniform_(-bound, bound)
            self.A_log.uniform_(0.01, 16).log_()
        self.dt_bias.fill_(1)
        self.norm_weight.fill_(1)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """[s, b, hidden] (packed: [t, 1, hidden] with `packed_seq_params`) → the same, and the output's bias.

        The mask is not looked at: padding may only stand behind a sequence, where nothing depends on it.
        """
        projected, _ = self.in_proj(hidden_states)
        length, batch = projected.shape[:2]
        rows = projected.transpose(0, 1).flatten(0, 1)
        cu_seqlens = _borders(packed_seq_params, batch, length * self.cp_group.size(), rows.device)
        own = None
        if self.cp_group.size() > 1:
            order, own = _zigzag_order(tuple(cu_seqlens.tolist()), self.cp_group.size(), self.cp_group.rank())
            rows = GatherChunks.apply(rows, self.cp_group).flatten(0, 1).index_select(0, order.to(rows.device))
        mixed = self._mix(rows, cu_seqlens)
        if own is not None:
            mixed = mixed.index_select(0, own.to(rows.device))
        return self.out_proj(mixed.unflatten(0, (batch, length)).transpose(0, 1).contiguous())

    def _mix(self, rows: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Projected rows [t, rows of this rank's heads] of whole sequences → normed, gated values [t, h_v * d_v]."""
        per_key = self.values_per_key
        heads = rows.unflatten(1, (self.key_heads, -1))
        sizes = [self.conv_channels, per_key * self.value_dim, per_key, per_key]
        mixed, gate, write, step = heads.split(sizes, dim=-1)
        mixed = self.kernels.conv(mixed.flatten(1), self.conv_weight.squeeze(1), cu_seqlens)
        query, key, value = mixed.unflatten(1, (self.key_heads, -1)).split(
            [self.key_dim, self.key_dim, per_key * self.value_dim], dim=-1
        )
        value = value.flatten(1).unflatten(1, (-1, self.value_dim))
        gate = gate.flatten(1).unflatten(1, (-1, self.value_dim))
        decay = -self.A_log.float().exp() * F.softplus(step.flatten(1).float() + self.dt_bias.float())
        out = self.kernels.delta_rule(query, key, value, decay, write.flatten(1).sigmoid(), cu_seqlens)
        return self._gated_norm(out, gate).flatten(1)

    def _gated_norm(self, x: Tensor, gate: Tensor) -> Tensor:
        # Each rank norms its own heads with the same weight, so its gradient is the sum over the ranks.
        weight = copy_to_tensor_model_parallel_region(self.norm_weight, self.tp_group)
        normed = F.rms_norm(x.float(), weight.shape, eps=self.config.layernorm_epsilon).to(x.dtype)
        return (weight * normed * F.silu(gate.float())).to(x.dtype)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
        tp_group: torch.distributed.ProcessGroup | None = None,
    ) -> ShardedStateDict:
        """As `MegatronModule`'s, which takes every parameter of the module's own for replicated."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        group = tp_group or self.tp_group
        parameters: dict[str, Any] = {}
        self._save_to_state_dict(parameters, "", keep_vars=True)
        sharded = make_sharded_tensors_for_checkpoint(
            parameters,
            prefix,
            dict.fromkeys(_CUT_OVER_HEADS, 0),
            sharded_offsets,
            tp_group=group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        for name, module in self.named_children():
            child = f"{prefix}{name}."
            sharded.update(sharded_state_dict_default(module, child, sharded_offsets, metadata, tp_group=group))
        return sharded


def _borders(params: PackedSeqParams | None, batch: int, length: int, device: torch.device) -> Tensor:
    """cu_seqlens of the whole sequences, those of every context-parallel rank together."""
    if params is None:
        return torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=device)
    return params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded


@functools.lru_cache(maxsize=16)  # every layer of a micro-batch asks for the same order
def _zigzag_order(borders: tuple[int, ...], cp: int, rank: int) -> tuple[Tensor, Tensor]:
    """Two permutations of a pack whose sequences are cut in zigzag chunks (see `cpu.context_parallel`).

    Returns:
        For each token of the pack its row in the ranks' joined rows, and the places in the pack of `rank`'s rows.
    """
    rows_per_rank = borders[-1] // cp
    order = torch.empty(borders[-1], dtype=torch.long)
    for start, end in itertools.pairwise(borders):
        size = (end - start) // (2 * cp)
        for chunk in range(2 * cp):
            owner, second = (chunk, 0) if chunk < cp else (2 * cp - 1 - chunk, size)
            first = owner * rows_per_rank + start // cp + second
            order[start + chunk * size : start + (chunk + 1) * size] = torch.arange(first, first + size)
    return order, order.argsort()[rank * rows_per_rank : (rank + 1) * rows_per_rank]
