"""The loss of multi-token-prediction layers: cross-entropy of the response tokens, further ahead."""

from __future__ import annotations

from argparse import Namespace
from typing import Any, NamedTuple

import torch

from slime.backends.megatron_utils.cp_utils import ContextParallel, current_context_parallel, slice_with_cp
from slime.utils.ppo_utils import calculate_log_probs_and_entropy

from .log_probs import tensor_parallel_group
from .reducers import loss_denominators, mask_sums


class Targets(NamedTuple):
    """What one prediction layer predicts on this rank: [n] rows of its logits, [n] token ids, [n] weights in the loss
    and in the metric."""

    rows: torch.Tensor
    tokens: torch.Tensor
    loss_weights: torch.Tensor
    metric_weights: torch.Tensor


def multi_token_loss(
    args: Namespace, batch: dict[str, Any], logits: list[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Mean over layers of the reduced cross-entropy, at temperature 1.

    Each loss token counts with the weight that it has in the main loss, so the sum over micro-batches and ranks is as
    independent of the layout. A token that no row predicts (the first of a response behind a very short prompt) is
    left out.

    Args:
        batch: unconcat_tokens, total_lengths, response_lengths, loss_masks, and what denominators need.
        logits: per layer, [1, packed tokens, vocabulary / tensor-parallel size].

    Returns:
        (loss, {"mtp_loss": mean over layers, "mtp_1_loss": ..., ...})
    """
    losses, means = [], []
    for depth, layer_logits in enumerate(logits, start=1):
        targets = find_targets(args, batch, depth, current_context_parallel())
        log_probs, _ = calculate_log_probs_and_entropy(
            layer_logits.squeeze(0),
            targets.tokens,
            tensor_parallel_group(),
            chunk_size=args.log_probs_chunk_size,
            rows=targets.rows,
            vocab_size=args.vocab_size,
        )
        losses.append(-(log_probs * targets.loss_weights).sum())
        means.append(-(log_probs.detach() * targets.metric_weights).sum())
    named = {f"mtp_{depth}_loss": mean for depth, mean in enumerate(means, start=1)}
    return torch.stack(losses).mean(), {"mtp_loss": torch.stack(means).mean(), **named}


def find_targets(args: Namespace, batch: dict[str, Any], depth: int, cp: ContextParallel) -> Targets:
    """The response tokens that layer `depth` (from 1) predicts on this rank: row i predicts token i + depth + 1."""
    offset = 0
    parts: list[tuple[torch.Tensor, ...]] = []
    columns = zip(
        batch["unconcat_tokens"], batch["total_lengths"], batch["response_lengths"], batch["loss_masks"],
        loss_denominators(args, batch), mask_sums(batch), strict=True,
    )  # fmt: skip
    for tokens, total, response, mask, denominator, mask_sum in columns:
        first = total - response
        target_of_row = torch.full((total,), -1)
        end = max(total - depth - 1, 0)
        begin = min(max(first - depth - 1, 0), end)
        target_of_row[begin:end] = torch.arange(begin, end) + depth + 1
        local = slice_with_cp(target_of_row, -1, cp)
        rows = (local >= 0).nonzero().squeeze(1)
        place = local[rows].to(tokens.device)
        kept = mask[place - first].float()
        if args.calculate_per_token_loss:
            weights = (kept, kept)
        else:
            weights = (kept / denominator.clamp(min=1), kept / mask_sum.clamp(min=1))
        parts.append(((rows + offset).to(tokens.device), tokens[place], *weights))
        offset += len(local)
    return Targets(*(torch.cat(column) for column in zip(*parts, strict=True)))
