"""One MoE layer's part of routing replay, in the place that megatron-core has for it. Written for 0.16.1."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum, auto

import torch
from megatron.core.transformer.moe.router_replay import RouterReplay
from torch import Tensor

TopK = Callable[..., tuple[Tensor, Tensor]]


class Mode(Enum):
    """What a layer does with the router's choice: let it pass, note it, or put another one in its place."""

    OFF = auto()
    RECORD = auto()
    REPLAY = auto()


class LayerReplay(RouterReplay):
    """Records and replays the expert choices of one router, per micro-batch.

    `TopKRouter` asks it for every choice (`get_replay_topk`). Megatron's own class holds one micro-batch, on the
    device; this one holds all of a rollout, on the host.

    Attributes:
        experts: micro-batch → [local tokens, top-k] expert ids on the host; -1 throughout a row: the router's choice.
        micro_batch: the one whose forward pass runs; None between forward passes, when only recomputation in a
            backward pass asks for choices. Backward passes follow in the order of the forward passes.
        measures: whether `changed` counts.
        padding: [local tokens], true where a token is padding and does not count; None: none is.
        changed: [tokens whose choice the replay changed, tokens replayed], on the device.
    """

    def __init__(self) -> None:
        super().__init__()
        RouterReplay.global_router_replay_instances.remove(self)  # its owner is RoutingReplay, not the process
        self.mode = Mode.OFF
        self.experts: dict[int, Tensor] = {}
        self.micro_batch: int | None = None
        self.measures = True
        self.padding: Tensor | None = None
        self.changed: Tensor | None = None
        self._recomputed_next: deque[int] = deque()

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(scores of the chosen experts, their ids), both [local tokens, top-k]; gradients flow through the scores.

        Args:
            scores: [local tokens, experts], what Megatron chooses by.
            default_compute_topk: Megatron's own choice.

        Raises:
            RuntimeError: the micro-batch was not recorded, or has another number of tokens.
        """
        assert default_compute_topk is not None
        if self.mode is Mode.REPLAY:
            with torch.no_grad():
                own = default_compute_topk(scores, topk, num_groups, group_topk)[1]
            chosen = self._replayed(own)
            return scores.gather(1, chosen), chosen
        values, chosen = default_compute_topk(scores, topk, num_groups, group_topk)
        if self.mode is Mode.RECORD and self.micro_batch is not None:
            self.experts[self.micro_batch] = chosen.to(smallest_dtype(scores.shape[1])).cpu()
        return values, chosen

    def finish(self) -> None:
        """Forget the order of forward passes: the step is over."""
        self._recomputed_next.clear()

    def _replayed(self, own: Tensor) -> Tensor:
        running = self.micro_batch is not None
        micro_batch = self.micro_batch if running else self._recomputed_next.popleft()
        assert micro_batch is not None
        if micro_batch not in self.experts or self.experts[micro_batch].shape != own.shape:
            shape = tuple(self.experts[micro_batch].shape) if micro_batch in self.experts else None
            raise RuntimeError(
                f"routing replay: micro-batch {micro_batch} has choices of shape {shape}, "
                f"its tokens {tuple(own.shape)}"
            )
        wanted = self.experts[micro_batch].to(own.device, own.dtype)
        chosen = torch.where(wanted < 0, own, wanted)
        if running:
            self._recomputed_next.append(micro_batch)
            if self.measures:
                self._count(own, chosen, wanted)
        return chosen

    def _count(self, own: Tensor, chosen: Tensor, wanted: Tensor) -> None:
        differs = (own.sort(dim=1).values != chosen.sort(dim=1).values).any(dim=1)
        replayed = (wanted >= 0).all(dim=1)
        if self.padding is not None:
            differs, replayed = differs & ~self.padding, replayed & ~self.padding
        counts = torch.stack([differs.sum(), replayed.sum()])
        self.changed = counts if self.changed is None else self.changed + counts


def smallest_dtype(num_experts: int) -> torch.dtype:
    """The smallest signed integer type that holds every expert's id."""
    return torch.int8 if num_experts <= 128 else torch.int16
