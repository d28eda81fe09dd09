"""What a model says about the response tokens of a packed micro-batch."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from slime.backends.megatron_utils.cp_utils import (
    ContextParallel,
    current_context_parallel,
    local_length,
    response_parts,
)
from slime.utils.ppo_utils import calculate_log_probs_and_entropy


class ResponseRows(NamedTuple):
    """Where the response tokens of a packed micro-batch lie on this rank.

    Attributes:
        rows: [n], the logits row that predicts each token.
        tokens: [n], their ids.
        lengths: [sample], how many of the n belong to each.
    """

    rows: torch.Tensor
    tokens: torch.Tensor
    lengths: list[int]


def find_response_rows(
    unconcat_tokens: Sequence[torch.Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    cp: ContextParallel,
) -> ResponseRows:
    """Rows and ids for all samples at once, so that one call computes a whole micro-batch.

    Args:
        unconcat_tokens: per sample, [total length], the whole sequence.
    """
    rows: list[torch.Tensor] = []
    tokens: list[torch.Tensor] = []
    lengths = []
    offset = 0
    for sequence, total, response in zip(unconcat_tokens, total_lengths, response_lengths, strict=True):
        count = 0
        for part in response_parts(total, response, cp):
            size = part.stop - part.start
            rows.append(torch.arange(offset + part.row, offset + part.row + size))
            tokens.append(sequence[total - response + part.start : total - response + part.stop])
            count += size
        lengths.append(count)
        offset += local_length(total, cp)
    if not rows:
        empty = torch.zeros(0, dtype=torch.long, device=unconcat_tokens[0].device)
        return ResponseRows(empty, empty, lengths)
    ids = torch.cat(tokens)
    return ResponseRows(torch.cat(rows).to(ids.device), ids, lengths)


def response_log_probs(
    logits: torch.Tensor,
    *,
    args: Namespace,
    unconcat_tokens: Sequence[torch.Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    with_entropy: bool,
    with_entropy_grad: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None, list[int]]:
    """Log-probs and entropy of all local response tokens, flat, and the number of tokens of each sample.

    The logits are divided by `args.rollout_temperature`, as the engine's are, so that both describe one distribution.

    Args:
        logits: [1, packed tokens, vocabulary / tensor-parallel size].
    """
    found = find_response_rows(unconcat_tokens, total_lengths, response_lengths, current_context_parallel())
    log_probs, entropy = calculate_log_probs_and_entropy(
        logits.squeeze(0),
        found.tokens,
        tensor_parallel_group(),
        with_entropy,
        args.log_probs_chunk_size,
        with_entropy_grad=with_entropy_grad,
        rows=found.rows,
        temperature=args.rollout_temperature,
        vocab_size=args.vocab_size,
    )
    return log_probs, entropy, found.lengths


def tensor_parallel_group() -> dist.ProcessGroup | None:
    """The ranks that hold the other parts of the vocabulary; None where model parallelism was not initialised."""
    if not dist.is_initialized():
        return None
    from megatron.core import parallel_state as mpu

    return mpu.get_tensor_model_parallel_group() if mpu.model_parallel_is_initialized() else None


def get_log_probs_and_entropy(
    logits: torch.Tensor,
    *,
    args: Namespace,
    unconcat_tokens: Sequence[torch.Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    with_entropy: bool = False,
    non_loss_data: bool = True,
) -> tuple[torch.Tensor, dict[str, list[torch.Tensor]]]:
    """Log-probs (and entropy) of the response tokens, per sample; context-parallel ranks hold their own tokens.

    Args:
        logits: [1, packed tokens, vocabulary / tensor-parallel size].
        unconcat_tokens: per sample, [total length].
        non_loss_data: Megatron sets it when it collects results that are no loss; has no effect.

    Returns:
        (an empty tensor where Megatron expects a loss, {"log_probs": ..., "entropy": ...})
    """
    log_probs, entropy, lengths = response_log_probs(
        logits,
        args=args,
        unconcat_tokens=unconcat_tokens,
        total_lengths=total_lengths,
        response_lengths=response_lengths,
        with_entropy=with_entropy,
    )
    result = {"log_probs": list(log_probs.split(lengths))}
    if entropy is not None:
        result["entropy"] = list(entropy.split(lengths))
    return logits.new_empty(0), result


def get_values(
    logits: torch.Tensor,
    *,
    args: Namespace,
    unconcat_tokens: Sequence[torch.Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    with_entropy: bool = False,
    non_loss_data: bool = True,
) -> tuple[torch.Tensor, dict[str, list[torch.Tensor]]]:
    """The critic's values of the response tokens, per sample. No temperature: values are no logits.

    Args:
        logits: [1, packed tokens, 1], the critic's head.
    """
    found = find_response_rows(unconcat_tokens, total_lengths, response_lengths, current_context_parallel())
    values = logits[0, :, 0].float().index_select(0, found.rows)
    return logits.new_empty(0), {"values": list(values.split(found.lengths))}
