"""Megatron's top-k router on packed, padded sequences. Written for megatron-core 0.16.1."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, save_to_aux_losses_tracker
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from slime.backends.megatron_utils.moe.layer_replay import LayerReplay
from slime.backends.megatron_utils.moe.sequence_balance import PackedSequences, sequence_balancing_loss


class PackedTopKRouter(TopKRouter):
    """`TopKRouter` for which padding does not count, and which can replay choices micro-batch by micro-batch.

    With a padding mask the stock one fails when it counts tokens for the expert bias, and weighs the z-loss of a
    token by how many tokens its tensor- or context-parallel rank has. It takes a packed micro-batch for one sequence.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.announced: deque[PackedSequences] = deque()  # of the training passes to come (`announce_sequences`)
        self.router_replay: LayerReplay | None = None
        if self.config.moe_enable_routing_replay:
            RouterReplay.global_router_replay_instances.pop()  # the one that Megatron has just made
            self.router_replay = LayerReplay()

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `TopKRouter`; padding_mask: [sequence, batch], true where a token is padding."""
        if self.router_replay is not None:
            self.router_replay.padding = None if padding_mask is None else padding_mask.reshape(-1)
        return super().routing(logits, padding_mask)

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Attach the mean over the micro-batch's tokens of logsumexp(logits)² (ST-MoE, arXiv:2202.08906).

        Args:
            logits: [local tokens, experts].
            padding_mask: [local tokens].
        """
        coefficient = self.config.moe_z_loss_coeff
        if coefficient is None or not self.training or not torch.is_grad_enabled():
            return logits
        values = torch.logsumexp(logits, dim=-1).square()
        if padding_mask is not None:
            values = values * ~padding_mask
        count = (logits.new_tensor(len(values)) if padding_mask is None else (~padding_mask).sum()).float()
        dist.all_reduce(count, group=self.tp_cp_group)
        mean = values.sum() / count.clamp(min=1)
        layers = self.config.num_layers + (self.config.mtp_num_layers or 0)
        save_to_aux_losses_tracker("z_loss", mean, self.layer_number, layers, reduce_group=self.tp_cp_group)
        return MoEAuxLossAutoScaler.apply(logits, mean * coefficient)

    def _apply_seq_aux_loss(self, probs: Tensor, scores: Tensor, chosen: Tensor, *_: Any, **__: Any) -> Tensor:
        """Attach each sequence's balancing loss; Megatron takes a packed micro-batch for one sequence.

        Prediction layers, to whom nobody announces sequences, have none.
        """
        coefficient = self.get_aux_loss_coeff("seq_aux_loss")
        if coefficient == 0 or not self.announced:
            return probs
        loss = sequence_balancing_loss(scores, chosen, self.announced.popleft(), self.topk, self.tp_cp_group)
        return self.attach_and_log_load_balancing_loss(
            probs, coefficient, loss * coefficient, "seq_load_balancing_loss", self.tp_cp_group
        )

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Count the tokens of each expert, once per training pass: not in the forward pass that is recomputed."""
        if not self.enable_expert_bias or not torch.is_grad_enabled():
            return
        with torch.no_grad():
            counted = routing_map if padding_mask is None else routing_map & ~padding_mask[:, None]
            self.local_tokens_per_expert += counted.sum(dim=0)


def router_inputs(model: torch.nn.Module, padding_mask: Tensor) -> dict[str, Tensor]:
    """What a GPT model takes for its routers: the padding mask, as the model's stage wants it.

    Args:
        model: one model chunk, without wrappers.
        padding_mask: [1, packed length].
    """
    from megatron.core import parallel_state as mpu
    from megatron.core.models.gpt import GPTModel

    if not isinstance(model, GPTModel) or model.config.num_moe_experts is None:
        return {}
    if model.config.sequence_parallel and not model.pre_process:  # only the first stage cuts it itself
        parts = padding_mask.chunk(mpu.get_tensor_model_parallel_world_size(), dim=1)
        padding_mask = parts[mpu.get_tensor_model_parallel_rank()]
    return {"padding_mask": padding_mask}


def use_packed_routers(spec: Any) -> None:
    """Put `PackedTopKRouter` in the place of Megatron's router in all MoE layers of a block's spec."""
    for part in _specs_within(spec):
        if isinstance(part.submodules, MoESubmodules) and part.submodules.router is TopKRouter:
            part.submodules.router = PackedTopKRouter


def _specs_within(spec: Any) -> Iterator[ModuleSpec]:
    """Every `ModuleSpec` in a spec, itself included."""
    if isinstance(spec, ModuleSpec):
        yield spec
        yield from _specs_within(spec.submodules)
    elif isinstance(spec, list | tuple):
        for item in spec:
            yield from _specs_within(item)
    elif hasattr(spec, "__dataclass_fields__"):
        for name in spec.__dataclass_fields__:
            yield from _specs_within(getattr(spec, name))
