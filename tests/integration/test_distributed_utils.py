"""Whitening over ranks, and groups with members outside the world."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from slime.utils.distributed_utils import (
    distributed_masked_whiten,
    get_gloo_group,
    init_gloo_group,
    init_process_group,
    tcp_init_method,
)
from slime.utils.misc import get_free_port
from tests.support.gloo_world import run_ranks


def test_ipv6_hosts_are_bracketed() -> None:
    """P11"""
    assert tcp_init_method("::1", 29500) == "tcp://[::1]:29500"
    assert tcp_init_method("[::1]", 29500) == "tcp://[::1]:29500"
    assert tcp_init_method("10.0.0.1", 1) == "tcp://10.0.0.1:1"


def _whiten(rank: int, world_size: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    values = torch.tensor([1.0, 2.0] if rank == 0 else [3.0, 4.0])
    whitened = distributed_masked_whiten(values, torch.ones(2))
    sign = -1 if rank == 0 else 1
    expected = sign * torch.tensor([1.161895, 0.387298] if rank == 0 else [0.387298, 1.161895])
    torch.testing.assert_close(whitened, expected, rtol=0, atol=1e-5)
    kept = distributed_masked_whiten(values, torch.ones(2), shift_mean=False)
    torch.testing.assert_close(kept, expected + 2.5, rtol=0, atol=1e-5)

    # one rank without a token: the other's statistics, and nobody waits for ever
    values = torch.tensor([1.0, 3.0]) if rank == 0 else torch.empty(0)
    whitened = distributed_masked_whiten(values, torch.ones_like(values))
    assert whitened.shape == values.shape
    if rank == 0:
        torch.testing.assert_close(whitened, torch.tensor([-0.7071068, 0.7071068]), rtol=0, atol=1e-5)

    # masked values don't count, large offsets don't cancel, one value or none is finite
    values = torch.tensor([1e6 + 1, 1e6 + 2, 77.0]) if rank == 0 else torch.tensor([1e6 + 3, 1e6 + 4, -1e9])
    whitened = distributed_masked_whiten(values, torch.tensor([1, 1, 0]))
    torch.testing.assert_close(whitened[:2], expected, rtol=0, atol=1e-5)
    for mask in (torch.zeros(3), torch.tensor([1.0 - rank, 0, 0])):
        assert distributed_masked_whiten(values, mask).isfinite().all()


def test_whitening_counts_all_ranks() -> None:
    """X10"""
    run_ranks(_whiten, 2)


def _extra_group(rank: int, world_size: int, store: str, port: int) -> None:
    """Ranks 0 and 1 have worlds of their own, as a trainer and an engine have, and meet in groups beside them."""
    dist.init_process_group("gloo", init_method=f"file://{store}{rank}", rank=0, world_size=1)
    groups = [
        init_process_group(
            backend="gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            timeout=timedelta(seconds=30),
            world_size=world_size,
            rank=rank,
            group_name=name,
        )
        for name in ("slime-pp_0", "slime-pp_1")
    ]
    for number, group in enumerate(groups):
        tensor = torch.full((3,), float(10 * number + rank))
        dist.broadcast(tensor, src=0, group=group)
        assert tensor.tolist() == [10.0 * number] * 3
        dist.destroy_process_group(group)
    assert dist.get_world_size() == 1
    assert init_gloo_group() is get_gloo_group()


def test_groups_with_members_outside_the_world() -> None:
    run_ranks(_extra_group, 2, get_free_port("127.0.0.1"))


def test_a_missing_gloo_group_and_bad_arguments_are_named() -> None:
    with pytest.raises(RuntimeError, match="init_gloo_group"):
        get_gloo_group()
    with pytest.raises(ValueError, match="group_name"):
        init_process_group(init_method="tcp://127.0.0.1:1", rank=0, world_size=1)
    with pytest.raises(ValueError, match="either store or init_method"):
        init_process_group(group_name="x")
