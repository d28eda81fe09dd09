"""Context parallelism of packed sequences (zigzag layout), and the reduction of token losses.

A sequence of `total_length` tokens is padded to 2 * size chunks of c = ceil(total_length / (2 * size)) tokens. Rank r
holds chunks r and 2 * size - 1 - r, one after the other, so that causal attention costs every rank the same. The
logits row of token t predicts token t + 1; "response tokens" are the last `response_length` ones.

Pure functions take the place of a rank as `cp`; without it they ask Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F


@dataclass(frozen=True)
class ContextParallel:
    """The place of a rank among those that share its sequences."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None


NO_CONTEXT_PARALLEL = ContextParallel()


def current_context_parallel() -> ContextParallel:
    """This process's place; alone when model parallelism was not initialised."""
    if not dist.is_initialized():
        return NO_CONTEXT_PARALLEL
    from megatron.core import parallel_state as mpu

    if not mpu.model_parallel_is_initialized() or mpu.get_context_parallel_world_size() == 1:
        return NO_CONTEXT_PARALLEL
    return ContextParallel(
        mpu.get_context_parallel_rank(), mpu.get_context_parallel_world_size(), mpu.get_context_parallel_group()
    )


class ResponsePart(NamedTuple):
    """A run of response tokens that lies on this rank: tokens [start, stop) of the response, whose logits are rows
    row, row + 1, ... of the rank's slice of the sequence."""

    start: int
    stop: int
    row: int


def chunk_size(total_length: int, cp_size: int) -> int:
    """Tokens per chunk."""
    return -(-total_length // (2 * cp_size))


def local_length(total_length: int, cp: ContextParallel) -> int:
    """Tokens of the sequence, padding included, that each rank holds."""
    return total_length if cp.size == 1 else 2 * chunk_size(total_length, cp.size)


def response_parts(total_length: int, response_length: int, cp: ContextParallel) -> list[ResponsePart]:
    """Where the response lies on this rank: at most two runs, in local order.

    Raises:
        ValueError: no token stands before the response, so nothing predicts its first token.
    """
    before = total_length - response_length - 1
    if before < 0:
        raise ValueError(
            f"a response of {response_length} tokens in a sequence of {total_length}: at least one token must stand "
            "before it"
        )
    if cp.size == 1:
        return [ResponsePart(0, response_length, before)] if response_length else []
    size = chunk_size(total_length, cp.size)
    parts = []
    for slot, chunk in enumerate((cp.rank, 2 * cp.size - 1 - cp.rank)):
        first = max(chunk * size, before)
        last = min((chunk + 1) * size, total_length - 1)
        if first < last:
            parts.append(ResponsePart(first - before, last - before, slot * size + first - chunk * size))
    return parts


def get_logits_and_tokens_offset_with_cp(
    total_length: int, response_length: int, cp: ContextParallel | None = None
) -> tuple[int, tuple[tuple[int, int], ...], tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
    """(chunk size, bounds of the two chunks, of the response logits in them, of the tokens those predict).

    Bounds are [start, stop) in the whole sequence; an empty run is (0, 0).
    """
    cp = cp or current_context_parallel()
    size = chunk_size(total_length, cp.size)
    before = total_length - response_length - 1
    chunks = tuple((c * size, (c + 1) * size) for c in (cp.rank, 2 * cp.size - 1 - cp.rank))
    bounds = [(max(start, before), min(stop, total_length - 1)) for start, stop in chunks]
    logits = tuple(b if b[0] < b[1] else (0, 0) for b in bounds)
    tokens = tuple((start + 1, stop + 1) if start < stop else (0, 0) for start, stop in logits)
    return size, chunks, logits, tokens


def slice_with_cp(
    tokens: torch.Tensor,
    pad_value: float | Callable[[torch.Tensor, int], torch.Tensor] = 0,
    cp: ContextParallel | None = None,
) -> torch.Tensor:
    """This rank's two chunks of a sequence, padded at the end.

    Args:
        tokens: [total length, ...].
        pad_value: what the padding holds, or a function (tensor, number of rows) -> padded tensor.
    """
    cp = cp or current_context_parallel()
    if cp.size == 1:
        return tokens
    size = chunk_size(len(tokens), cp.size)
    missing = 2 * cp.size * size - len(tokens)
    if callable(pad_value):
        tokens = pad_value(tokens, missing)
    else:
        tokens = F.pad(tokens, (0, 0) * (tokens.dim() - 1) + (0, missing), value=pad_value)
    other = 2 * cp.size - 1 - cp.rank
    return torch.cat([tokens[cp.rank * size : (cp.rank + 1) * size], tokens[other * size : (other + 1) * size]])


def slice_log_prob_with_cp(
    log_prob: Sequence[float] | torch.Tensor,
    total_length: int,
    response_length: int,
    cp: ContextParallel | None = None,
) -> Sequence[float] | torch.Tensor:
    """The values of the response tokens whose logits lie on this rank, in local order.

    Args:
        log_prob: [response length], one value per response token.

    Raises:
        ValueError: its length is not the response's.
    """
    cp = cp or current_context_parallel()
    if len(log_prob) != response_length:
        raise ValueError(f"{len(log_prob)} values for a response of {response_length} tokens")
    if cp.size == 1:
        return log_prob
    parts = [log_prob[p.start : p.stop] for p in response_parts(total_length, response_length, cp)]
    if isinstance(log_prob, torch.Tensor):
        return torch.cat([log_prob[:0], *parts])
    return [value for part in parts for value in part]


def all_gather_with_cp(
    tensor: torch.Tensor, total_length: int, response_length: int, cp: ContextParallel | None = None
) -> torch.Tensor:
    """The whole response's values from every rank's local ones; differentiable.

    Args:
        tensor: [local response tokens].

    Returns:
        [response length], the same on every rank of the group.
    """
    return all_gather_samples_with_cp([tensor], [total_length], [response_length], cp)[0]


def all_gather_samples_with_cp(
    tensors: Sequence[torch.Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    cp: ContextParallel | None = None,
) -> list[torch.Tensor]:
    """`all_gather_with_cp` of several samples in one collective; every rank must bring the same samples."""
    cp = cp or current_context_parallel()
    if cp.size == 1 or not tensors:
        return list(tensors)
    places = []
    offset = 0
    for total, response in zip(total_lengths, response_lengths, strict=True):
        places += [torch.arange(offset + p.start, offset + p.stop) for p in response_parts(total, response, cp)]
        offset += response
    local = torch.cat(list(tensors))
    index = torch.cat([torch.zeros(0, dtype=torch.long), *places]).to(local.device)
    # index_copy keeps the graph also where this rank holds no token, so that all ranks join the backward collective
    full = local.new_zeros(offset).index_copy(0, index, local)
    return list(_SumOverRanks.apply(full, cp.group).split(list(response_lengths)))


class _SumOverRanks(torch.autograd.Function):
    """All-reduce whose gradient is the all-reduce of the gradients: each rank uses the sum in its own loss."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def get_sum_of_sample_mean(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[torch.Tensor],
    sample_denoms: Sequence[torch.Tensor] | torch.Tensor | None = None,
    calculate_per_token_loss: bool = False,
    cp: ContextParallel | None = None,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function that sums token values over the samples of a micro-batch.

    Default: sum_i sum_t m_it x_it / max(d_i, 1), where the denominator d_i is the number of loss tokens of the whole
    rollout execution that sample i belongs to (`sample_denoms`), so that siblings of one execution share one mean;
    without it, the sample's own. With `calculate_per_token_loss`: sum_i sum_t m_it x_it. Example, two samples with
    losses [4] and [1, 1, 1] in a step of two: the default gives (4/1 + 3/3) / 2 = 2.5, the per-token mode
    (4 + 3) / 4 = 1.75 once the caller has divided by 2 samples or 4 tokens.

    Masked tokens never count in a denominator. Under context parallelism each rank sums its own tokens with the
    denominators of the whole sample, so the sum over ranks is the value.

    Args:
        loss_masks: per sample, [response length], whole responses.
        sample_denoms: per sample, a number.

    Returns:
        A function from [local response tokens of all samples] to a 0-d tensor.
    """
    cp = cp or current_context_parallel()
    if not loss_masks:
        return lambda x: x.sum() * 0.0
    weights = [mask.float() for mask in loss_masks]
    if not calculate_per_token_loss:
        if sample_denoms is None:
            sample_denoms = [mask.sum() for mask in weights]
        denoms = torch.as_tensor(sample_denoms, dtype=torch.float32, device=weights[0].device).clamp(min=1)
        weights = [mask / denom for mask, denom in zip(weights, denoms, strict=True)]
    lengths = zip(weights, total_lengths, response_lengths, strict=True)
    flat = torch.cat([torch.as_tensor(slice_log_prob_with_cp(w, total, n, cp)) for w, total, n in lengths])
    return lambda x: (x * flat).sum()
