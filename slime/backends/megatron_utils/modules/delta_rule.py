"""The gated delta rule and its convolution in plain PyTorch, over packed sequences (Yang et al. 2024, Gated DeltaNet).

    S_t = exp(g_t) · S_{t-1} · (I - β_t k_t k_tᵀ) + β_t v_t k_tᵀ,        o_t = S_t q_t

Nothing crosses the border of two sequences: neither states nor the convolution's window.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from slime.backends.megatron_utils.cpu.sequence_batches import plan_batches

_CHUNK = 64  # tokens that are solved together; the state is carried from one chunk to the next


@dataclass(frozen=True)
class DeltaRuleKernels:
    """The two operations of a gated delta net that cross tokens.

    conv(x [t, channels], weight [channels, window], cu_seqlens) -> [t, channels], SiLU applied.
    delta_rule(query [t, h_k, d_k], key, value [t, h_v, d_v], decay [t, h_v], beta [t, h_v], cu_seqlens) ->
    [t, h_v, d_v]; queries and keys are normalised inside, `decay` is a logarithm.
    `cu_seqlens` [sequences + 1] are the borders of the pack's sequences, an int tensor.
    """

    conv: Callable[[Tensor, Tensor, Tensor], Tensor]
    delta_rule: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def packed_conv(x: Tensor, weight: Tensor, cu_seqlens: Tensor) -> Tensor:
    """`DeltaRuleKernels.conv`: each channel's own causal convolution, then SiLU."""
    plan = plan_batches(tuple(cu_seqlens.diff().tolist()), fill=True)
    channels, window = weight.shape
    outputs = []
    for batch in plan.batches:
        padded = F.pad(batch.take(x).transpose(1, 2), (window - 1, 0))
        outputs.append(F.silu(F.conv1d(padded, weight.unsqueeze(1), groups=channels)).transpose(1, 2))
    return plan.join(outputs)


def packed_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """`DeltaRuleKernels.delta_rule`."""
    plan = plan_batches(tuple(cu_seqlens.diff().tolist()), fill=True)
    return plan.join([gated_delta_rule(*map(batch.take, (query, key, value, decay, beta))) for batch in plan.batches])


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, chunk: int = _CHUNK
) -> Tensor:
    """The rule over whole sequences of equal length, chunk by chunk, in float32.

    Args:
        query, key: [n, s, h_k, d_k]; a key head serves h_v / h_k value heads.
        value: [n, s, h_v, d_v].
        decay: [n, s, h_v], the logarithm of what is kept of the state, at most 0.
        beta: [n, s, h_v], how much of a value is written, in 0..1.

    Returns:
        [n, s, h_v, d_v] in the dtype of `value`.
    """
    length, repeats = value.shape[1], value.shape[2] // key.shape[2]
    chunk = min(chunk, length)
    query, key = (_unit(x.float()).repeat_interleave(repeats, dim=2) for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    q, k, v = (_chunks(x, chunk) for x in (query, key, value.float()))  # [n, h, chunks, c, d]
    g, b = (_chunks(x.float().unsqueeze(-1), chunk) for x in (decay, beta))  # [n, h, chunks, c, 1]
    fading, kept = _fading(g), g.cumsum(dim=3).exp()  # kept: of the state before the chunk, at each token
    # What each token writes depends on what those before it in the chunk wrote: a triangular system.
    system = (b * k) @ k.transpose(-1, -2) * fading
    solve = torch.linalg.solve_triangular
    written = solve(system, b * v, upper=False, unitriangular=True)
    read_back = solve(system, b * k * kept, upper=False, unitriangular=True)
    within = q @ k.transpose(-1, -2) * fading
    q_state, k_state = q * kept, k * fading[..., -1:, :].transpose(-1, -2)
    state = v.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1])
    outputs = []
    for i in range(v.shape[2]):
        new = written[:, :, i] - read_back[:, :, i] @ state
        outputs.append(q_state[:, :, i] @ state + within[:, :, i] @ new)
        state = state * kept[:, :, i, -1:] + k_state[:, :, i].transpose(-1, -2) @ new
    out = torch.stack(outputs, dim=2).flatten(2, 3)[:, :, :length]
    return out.transpose(1, 2).to(value.dtype)


def _fading(decay: Tensor) -> Tensor:
    """[..., c, 1] → [..., c, c]: what is left at token i of what token j wrote, 0 for j > i.

    Summed from j to i, not taken as a difference of two sums from the start, which loses digits where decay is strong.
    """
    size = decay.shape[-2]
    lower = torch.ones(size, size, dtype=torch.bool, device=decay.device).tril()
    between = decay.expand(*decay.shape[:-1], size).masked_fill(~lower.tril(-1), 0).cumsum(dim=-2)
    return between.masked_fill(~lower, float("-inf")).exp()


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _chunks(x: Tensor, chunk: int) -> Tensor:
    """[n, s, h, d] → [n, h, chunks, chunk, d]; zeros fill up the last chunk and change nothing before them."""
    x = F.pad(x.transpose(1, 2), (0, 0, 0, -x.shape[1] % chunk))
    return x.unflatten(2, (-1, chunk))


TORCH_KERNELS = DeltaRuleKernels(packed_conv, packed_delta_rule)
