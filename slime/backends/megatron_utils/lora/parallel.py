"""How an adapter is cut over the ranks that share its linear layer, and what they tell each other.

With y = W x + s B A x, A [rank, inputs] and B [outputs, rank]:

====================  ======================  =======================  =============================================
linear layer          A                       B                        between A and B, on tokens x rank values
====================  ======================  =======================  =============================================
column (outputs cut)  whole on every rank     cut along the outputs    nothing; the gradient is summed
the same, sequence p. whole, sees its tokens  cut along the outputs    tokens are gathered
row (inputs cut)      cut along the inputs    whole on every rank      summed
the same, sequence p. cut along the inputs    whole, for its tokens    summed, each rank takes its tokens
column of an expert   cut along the rank      cut along the outputs    ranks are gathered
row of an expert      cut along the inputs    cut along the rank       summed, each takes its part of the rank
====================  ======================  =======================  =============================================

A matrix that is whole but sees only a part of the tokens gets its gradient summed by Megatron, as layer norms do.
Experts' ranks see the same tokens, and the dispatcher sums their outputs and input gradients: so an expert's adapter
gives partial sums, and no matrix of it is whole on several ranks. Written for megatron-core 0.16.1.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from slime.backends.megatron_utils.update_weight.common import tensor_parallel_group

# (column, expert, sequence parallel) -> the autograd function of megatron.core.tensor_parallel.mappings
_BETWEEN = {
    (True, False, False): "copy_to_tensor_model_parallel_region",
    (True, False, True): "gather_from_sequence_parallel_region",
    (False, False, False): "reduce_from_tensor_model_parallel_region",
    (False, False, True): "reduce_scatter_to_sequence_parallel_region",
    (True, True, False): "all_gather_last_dim_from_tensor_parallel_region",
    (False, True, False): "reduce_scatter_last_dim_to_tensor_parallel_region",
}


@dataclasses.dataclass(frozen=True)
class Cut:
    """Of one linear layer and its adapter; `rank` of `size` ranks share it. See the table above."""

    column: bool
    expert: bool
    sequence_parallel: bool
    rank: int
    size: int

    @property
    def down_dim(self) -> int | None:
        """The dimension along which A is cut; None: whole."""
        if self.column:
            return 0 if self.expert else None
        return 1

    @property
    def up_dim(self) -> int | None:
        """The same of B."""
        if self.column:
            return 0
        return 1 if self.expert else None

    @property
    def rank_shards(self) -> int:
        """In how many pieces the rank is cut."""
        return self.size if self.expert else 1

    def between(self, hidden: Tensor) -> Tensor:
        """From what this rank's A gives to what its B takes: [tokens, ..., rank] both."""
        if self.size == 1:
            return hidden
        from megatron.core.tensor_parallel import mappings

        sequence_parallel = self.sequence_parallel and not self.expert
        exchange = getattr(mappings, _BETWEEN[self.column, self.expert, sequence_parallel])
        return exchange(hidden, group=tensor_parallel_group(self.expert))

    def shard(self, full: Tensor, dim: int | None, sections: tuple[int, ...]) -> Tensor:
        """This rank's part of a whole A or B: of each section (its size on one rank) the same part.

        Raises:
            ValueError: the dimension can't be divided.
        """
        if dim is None or self.size == 1:
            return full
        if full.shape[dim] != sum(sections) * self.size:
            raise ValueError(
                f"dimension {dim} of an adapter of shape {tuple(full.shape)} can't be cut in {self.size} of {sections}"
            )
        whole = full.split([section * self.size for section in sections], dim=dim)
        return torch.cat([section.chunk(self.size, dim=dim)[self.rank] for section in whole], dim=dim)

    def gather(self, shard: Tensor, dim: int | None, sections: tuple[int, ...]) -> Tensor:
        """The whole A or B; all ranks that share the layer take part."""
        if dim is None or self.size == 1:
            return shard
        shards = [torch.empty_like(shard) for _ in range(self.size)]
        torch.distributed.all_gather(shards, shard.contiguous(), group=tensor_parallel_group(self.expert))
        by_section = zip(*(each.split(sections, dim=dim) for each in shards), strict=True)
        return torch.cat([part for section in by_section for part in section], dim=dim)

    def mark(self, parameter: torch.nn.Parameter, dim: int | None, base: Any) -> None:
        """Tell Megatron's gradient norm, reductions and buffers what this parameter is, as `base` is marked."""
        # a duplicate counts once in the gradient norm; of experts nothing is a duplicate
        parameter.tensor_model_parallel = self.expert or dim is not None
        parameter.partition_dim = -1 if dim is None else dim
        parameter.partition_stride = 1
        parameter.allreduce = getattr(base, "allreduce", True)
        parameter.sequence_parallel = self.sequence_parallel and not self.expert and dim is None
