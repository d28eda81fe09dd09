"""Log-probs and entropy of sampled tokens from vocab-parallel logits, in float32 and lean on memory."""

from __future__ import annotations

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
    in float32, at most `chunk_size` rows at a time in both passes: besides the gradient, which has the logits' shape
    and type, memory does not grow with the number of rows. The logits themselves are kept for the backward pass.

    Args:
        logits: [tokens, vocabulary / tensor-parallel size], any float type.
        tokens: [n], the target ids, long; global ids also when the vocabulary is split.
        tp_group: the ranks that hold the other parts of the vocabulary; None for the whole of it.
        with_entropy: also return the entropy.
        chunk_size: rows per chunk; all at once when it is not positive.
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

    def logsumexp(self, x: torch.Tensor) -> torch.Tensor:
        """[rows] over the whole vocabulary."""
        if self.group is None or self.group.size() == 1:
            return x.logsumexp(-1)
        peak = _all_reduce(x.amax(-1), dist.ReduceOp.MAX, self.group)
        total = _all_reduce((x - peak[:, None]).exp_().sum(-1), dist.ReduceOp.SUM, self.group)
        return peak + total.log()


def _kept(x: torch.Tensor, keep: torch.Tensor | None, column: torch.Tensor, here: torch.Tensor) -> torch.Tensor:
    """`x` with the columns that the keep mask drops at probability 0."""
    if keep is None:
        return x
    keep = keep.clone()
    keep[here.nonzero()[:, 0], column[here]] = True
    return x.masked_fill(~keep, _PADDING_LOGIT)


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
        n = len(tokens)
        shard = _Shard(logits.size(1), tp_group, vocab_size)
        step = chunk_size if chunk_size > 0 else max(n, 1)
        log_probs = torch.empty(n, dtype=torch.float32, device=logits.device)
        lse = torch.empty_like(log_probs)
        full_lse = lse if keep_mask is None else torch.empty_like(log_probs)
        entropy = torch.empty_like(log_probs) if with_entropy else log_probs.new_empty(0)
        for start in range(0, n, step):
            part = slice(start, start + step)
            x = shard.scaled(logits, rows[part], temperature)
            column, here = shard.local_targets(tokens[part])
            kept = _kept(x, None if keep_mask is None else keep_mask[part], column, here)
            lse[part] = shard.logsumexp(kept)
            target = x.gather(1, column[:, None])[:, 0].masked_fill(~here, 0.0)
            log_probs[part] = _all_reduce(target, dist.ReduceOp.SUM, tp_group) - lse[part]
            if with_entropy:
                if keep_mask is not None:
                    full_lse[part] = shard.logsumexp(x)
                # H = logsumexp - sum_j p_j x_j
                mean_logit = ((x - full_lse[part, None]).exp_().mul_(x)).sum(-1)
                entropy[part] = full_lse[part] - _all_reduce(mean_logit, dist.ReduceOp.SUM, tp_group)
        ctx.save_for_backward(logits, tokens, rows, keep_mask, lse, full_lse, entropy)
        ctx.shard, ctx.step, ctx.temperature = shard, step, temperature
        ctx.with_entropy_grad = with_entropy and with_entropy_grad
        if not ctx.with_entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_log_probs: torch.Tensor, grad_entropy: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        logits, tokens, rows, keep_mask, lse, full_lse, entropy = ctx.saved_tensors
        shard: _Shard = ctx.shard
        grad = torch.zeros_like(logits)
        for start in range(0, len(tokens), ctx.step):
            part = slice(start, start + ctx.step)
            x = shard.scaled(logits, rows[part], ctx.temperature)
            column, here = shard.local_targets(tokens[part])
            kept = _kept(x, None if keep_mask is None else keep_mask[part], column, here)
            # d log p_target / dx = onehot - p
            g = (kept - lse[part, None]).exp_().mul_(-grad_log_probs[part, None])
            g.scatter_add_(1, column[:, None], (grad_log_probs[part] * here)[:, None])
            if ctx.with_entropy_grad:
                # dH / dx_j = -p_j (log p_j + H)
                log_p = x - full_lse[part, None]
                g -= log_p.exp() * (log_p + entropy[part, None]) * grad_entropy[part, None]
            if ctx.temperature != 1.0:
                g /= ctx.temperature
            grad.index_copy_(0, rows[part], g.to(grad.dtype))
        return (grad,) + (None,) * 9
