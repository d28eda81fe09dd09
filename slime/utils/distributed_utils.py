"""Process groups beside Megatron's: one gloo group over all trainers, groups shared with engines, and whitening."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    Backend,
    PrefixStore,
    Store,
    _new_process_group_helper,
    _world,
    default_pg_timeout,
    rendezvous,
)

from slime.utils.reloadable_process_group import new_permanent_group

_gloo_group: dist.ProcessGroup | None = None


def tcp_init_method(host: str, port: int) -> str:
    """`tcp://host:port`, an IPv6 address in brackets."""
    bracketed = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return f"tcp://{bracketed}:{port}"


def init_gloo_group() -> dist.ProcessGroup:
    """The gloo group over all ranks, for objects and CPU tensors; made at the first call, by every rank together.

    It stays alive while the trainer sleeps.
    """
    global _gloo_group
    if _gloo_group is None or _gloo_group not in _world.pg_map:  # or the default group was made anew
        _gloo_group = new_permanent_group(backend="gloo")
    return _gloo_group


def get_gloo_group() -> dist.ProcessGroup:
    """The gloo group over all ranks.

    Raises:
        RuntimeError: `init_gloo_group` was not called.
    """
    if _gloo_group is None:
        raise RuntimeError("there is no gloo group: every rank must call init_gloo_group() first")
    return _gloo_group


def set_gloo_group(group: dist.ProcessGroup | None) -> None:
    """Use this group as the gloo group over all ranks; None forgets it."""
    global _gloo_group
    _gloo_group = group


def init_process_group(
    backend: str | Backend | None = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Store | None = None,
    group_name: str | None = None,
    pg_options: Any | None = None,
) -> dist.ProcessGroup:
    """A group with members outside this process's world (a trainer and its engines), beside the default group.

    Same meaning of the arguments as `torch.distributed.init_process_group`, which makes the default group only.

    Raises:
        ValueError: neither or both of `store` and `init_method`, or no `group_name`.
    """
    if (store is None) == (init_method is None):
        raise ValueError("give either store or init_method")
    if not group_name:
        raise ValueError("a group beside the default one needs a group_name")
    timeout = default_pg_timeout if timeout is None else timeout
    if store is None:
        store, rank, world_size = next(rendezvous(init_method, rank, world_size, timeout=timeout))
        store.set_timeout(timeout)
        store = PrefixStore(group_name, store)  # several groups may share one address
    group, _ = _new_process_group_helper(
        world_size,
        rank,
        [],
        Backend(backend) if backend else Backend("undefined"),
        store,
        group_name=group_name,
        backend_options=pg_options,
        timeout=timeout,
    )
    _world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


def distributed_masked_mean_and_variance(
    values: torch.Tensor, mask: torch.Tensor, process_group: dist.ProcessGroup | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and unbiased variance of the values whose mask is not 0, over all ranks of the group, as float64 scalars.

    Every rank must call it; a rank may bring no values. No value at all gives mean 0, fewer than two variance 0.
    """
    kept = values.double() * mask
    sums = torch.stack([kept.sum(), mask.double().sum()])
    dist.all_reduce(sums, group=process_group)
    total, count = sums
    mean = total / count.clamp(min=1)
    squares = (((values.double() - mean) ** 2) * mask).sum()  # centred first: no cancellation
    dist.all_reduce(squares, group=process_group)
    return mean, squares / (count - 1).clamp(min=1)


def distributed_masked_whiten(
    values: torch.Tensor,
    mask: torch.Tensor,
    process_group: dist.ProcessGroup | None = None,
    shift_mean: bool = True,
    epsilon: float = 1e-8,
) -> torch.Tensor:
    """(values - mean) / sqrt(variance + epsilon), the statistics over the masked values of all ranks of the group.

    Args:
        values: any shape, may be empty; this rank's part.
        mask: the same shape, 1 where a value counts.
        process_group: the ranks whose values belong together (data x context parallel); None is the world.
        shift_mean: False only scales around the mean, which stays.

    Returns:
        Whitened values in the shape and dtype of `values`.
    """
    mean, variance = distributed_masked_mean_and_variance(values, mask, process_group)
    whitened = (values.double() - mean) * torch.rsqrt(variance + epsilon)
    if not shift_mean:
        whitened = whitened + mean
    return whitened.to(values.dtype)
