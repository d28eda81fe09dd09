"""Log-probs and entropy of sampled tokens from vocab-parallel logits, in float32 and lean on memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

# Stands for -inf in vocabulary columns that only pad the embedding: exp() gives 0, products with 0 stay finite.
_PADDING_LOGIT = -1.0e30


def calculate_log_probs_and_entropy(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    tp_group: dist.ProcessGroup | None = None,
    with_entropy: bool = False,
    chunk_size: int = -1,
    log_prob_keep_mask: torch.Tensor | None = None,
    with_entropy_grad: bool = True,
    *,
    rows: torch.Tensor | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs of `tokens` and the entropy of the distributions they come from.

    With x = logits[rows] / temperature: log p_j = x_j - logsumexp(x); H = -sum_j p_j log p_j. Everything is computed
    in float32. Besides the gradient, which has the logits' shape and type, neither pass takes more memory than
    `chunk_size` rows in float32, whatever the number of rows. The logits are kept for the backward pass.

    Args:
        logits: [tokens, vocabulary / tensor-parallel size], any float type.
        tokens: [n], the target ids, long; global ids also when the vocabulary is split.
        tp_group: the ranks that hold the other parts of the vocabulary; None for the whole of it.
        with_entropy: also return the entropy.
        chunk_size: the rows whose float32 copy bounds the memory; all rows when it is not positive.
        log_prob_keep_mask: [n, vocabulary / tensor-parallel size], bool: the log-prob's softmax runs over these
            columns only, to which the target always belongs. The entropy stays that of the whole vocabulary.
        with_entropy_grad: whether the entropy takes part in the backward pass.
        rows: [n], which row of `logits` predicts each target, without repetition; default 0..n-1.
        temperature: the sampling temperature.
        vocab_size: ids from here on only pad the embedding and have probability 0; default: none do.

    Returns:
        (log-probs [n] float32, entropy [n] float32 or None)
    """
    if rows is None:
        rows = torch.arange(len(tokens), device=logits.device)
    log_probs, entropy = _LogProbsAndEntropy.apply(
        logits, tokens, rows, log_prob_keep_mask, tp_group, with_entropy, chunk_size, with_entropy_grad,
        temperature, vocab_size,
    )  # fmt: skip
    return log_probs, (entropy if with_entropy else None)


# A chunk is worked on in this many blocks, so that a block and its temporaries are smaller than the chunk.
_BLOCKS_PER_CHUNK = 4
# Smaller blocks would only cost kernel launches: 2^20 elements are 4 MiB.
_SMALLEST_BLOCK = 1 << 20


def _all_reduce(x: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> torch.Tensor:
    if group is not None and group.size() > 1:
        dist.all_reduce(x, op=op, group=group)
    return x


class _Shard:
    """What a rank needs to know about its part of the vocabulary."""

    def __init__(self, width: int, group: dist.ProcessGroup | None, vocab_size: int | None) -> None:
        self.width = width
        self.group = group
        self.start = width * (group.rank() if group is not None else 0)
        self.valid = width if vocab_size is None else min(max(vocab_size - self.start, 0), width)

    def blocks(self, rows: int, chunk_size: int) -> Iterator[slice]:
        """Runs of rows to work on at a time."""
        chunk = min(chunk_size, rows) if chunk_size > 0 else rows
        smallest = min(-(-_SMALLEST_BLOCK // self.width), chunk)
        size = max(-(-chunk // _BLOCKS_PER_CHUNK), smallest, 1)
        for start in range(0, rows, size):
            yield slice(start, min(start + size, rows))

    def scaled(self, logits: torch.Tensor, rows: torch.Tensor, temperature: float) -> torch.Tensor:
        """A new float32 tensor [rows, width]."""
        x = logits.index_select(0, rows).float()
        if temperature != 1.0:
            x /= temperature
        if self.valid < self.width:
            x[:, self.valid :] = _PADDING_LOGIT
        return x

    def local_targets(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(column of each target in this part, whether it lies in it)."""
        local = tokens - self.start
        here = (local >= 0) & (local < self.width)
        return local.clamp(0, self.width - 1), here


class _Sums:
    """logsumexp(x) and sum_j p_j x_j of each row, gathered block by block and then over the vocabulary's parts."""

    def __init__(self, like: torch.Tensor) -> None:
        self.peak, self.total, self.weighted = (torch.empty_like(like) for _ in range(3))

    def add(self, block: slice, x: torch.Tensor, weighted: bool) -> None:
        """`x` [rows, width] of this rank; one temporary of its size."""
        self.peak[block] = x.amax(-1)
        exp = (x - self.peak[block, None]).exp_()
        self.total[block] = exp.sum(-1)
        if weighted:
            self.weighted[block] = exp.mul_(x).sum(-1)

    def reduce(self, group: dist.ProcessGroup | None, weighted: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """(logsumexp, mean logit) over all ranks; the latter is meaningless unless `weighted`."""
        peak = _all_reduce(self.peak.clone(), dist.ReduceOp.MAX, group)
        sums = torch.stack([self.total, self.weighted]) if weighted else self.total[None]
        sums = _all_reduce(sums * (self.peak - peak).exp(), dist.ReduceOp.SUM, group)
        return peak + sums[0].log(), sums[-1] / sums[0]


def _kept(x: torch.Tensor, keep: torch.Tensor, column: torch.Tensor, here: torch.Tensor) -> torch.Tensor:
    """`x`, changed in place: the columns that the keep mask drops get probability 0, but for the targets."""
    targets = x.gather(1, column[:, None])
    x.masked_fill_(~keep, _PADDING_LOGIT)
    return x.scatter_(1, column[:, None], torch.where(here[:, None], targets, x.gather(1, column[:, None])))


class _LogProbsAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        rows: torch.Tensor,
        keep_mask: torch.Tensor | None,
        tp_group: dist.ProcessGroup | None,
        with_entropy: bool,
        chunk_size: int,
        with_entropy_grad: bool,
        temperature: float,
        vocab_size: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shard = _Shard(logits.size(1), tp_group, vocab_size)
        targets = torch.empty(len(tokens), dtype=torch.float32, device=logits.device)
        whole, kept = _Sums(targets), _Sums(targets)
        for block in shard.blocks(len(tokens), chunk_size):
            x = shard.scaled(logits, rows[block], temperature)
            column, here = shard.local_targets(tokens[block])
            targets[block] = x.gather(1, column[:, None])[:, 0].masked_fill(~here, 0.0)
            if with_entropy or keep_mask is None:
                whole.add(block, x, weighted=with_entropy)
            if keep_mask is not None:
                kept.add(block, _kept(x, keep_mask[block], column, here), weighted=False)
            del x  # before the next block is made
        targets = _all_reduce(targets, dist.ReduceOp.SUM, tp_group)
        lse, entropy = None, targets.new_empty(0)
        if with_entropy or keep_mask is None:
            lse, mean_logit = whole.reduce(tp_group, weighted=with_entropy)
            if with_entropy:
                entropy = lse - mean_logit  # H = logsumexp - sum_j p_j x_j
        kept_lse = lse if keep_mask is None else kept.reduce(tp_group, weighted=False)[0]
        ctx.save_for_backward(logits, tokens, rows, keep_mask, kept_lse, lse, entropy)
        ctx.shard, ctx.chunk_size, ctx.temperature = shard, chunk_size, temperature
        ctx.with_entropy_grad = with_entropy and with_entropy_grad
        if not ctx.with_entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return targets - kept_lse, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_log_probs: torch.Tensor, grad_entropy: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        logits, tokens, rows, keep_mask, kept_lse, lse, entropy = ctx.saved_tensors
        shard: _Shard = ctx.shard
        grad = torch.zeros_like(logits)
        for block in shard.blocks(len(tokens), ctx.chunk_size):
            x = shard.scaled(logits, rows[block], ctx.temperature)
            column, here = shard.local_targets(tokens[block])
            # d log p_target / dx = onehot - p
            weight = -grad_log_probs[block, None]
            if keep_mask is None and not ctx.with_entropy_grad:
                g = x.sub_(lse[block, None]).exp_().mul_(weight)
            elif keep_mask is None:
                g = _entropy_gradient(x, lse[block], entropy[block], grad_entropy[block], weight)
            else:
                g = torch.zeros_like(x)
                if ctx.with_entropy_grad:
                    g = _entropy_gradient(x.clone(), lse[block], entropy[block], grad_entropy[block], None)
                g.addcmul_(_kept(x, keep_mask[block], column, here).sub_(kept_lse[block, None]).exp_(), weight)
            g.scatter_add_(1, column[:, None], (grad_log_probs[block] * here)[:, None])
            if ctx.temperature != 1.0:
                g /= ctx.temperature
            grad.index_copy_(0, rows[block], g.to(grad.dtype))
            del x, g
        return (grad,) + (None,) * 9


def _entropy_gradient(
    x: torch.Tensor,
    lse: torch.Tensor,
    entropy: torch.Tensor,
    grad_entropy: torch.Tensor,
    weight: torch.Tensor | None,
) -> torch.Tensor:
    """p_j * (weight - (log p_j + H) * grad_entropy), since dH / dx_j = -p_j (log p_j + H). Uses up `x`."""
    log_p = x.sub_(lse[:, None])
    p = log_p.exp()
    inner = log_p.add_(entropy[:, None]).mul_(-grad_entropy[:, None])
    if weight is not None:
        inner += weight
    return p.mul_(inner)
