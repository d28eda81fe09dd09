"""Process groups that are destroyed and rebuilt in place: every collective, twice, in worlds of one and two."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slime.utils import distributed_utils, reloadable_process_group
from slime.utils.reloadable_process_group import ReloadableProcessGroup
from tests.support.gloo_world import run_ranks


def _join(rank: int, world_size: int, store: str) -> None:
    reloadable_process_group.monkey_patch_torch_dist()
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )


def _check_collectives(group: dist.ProcessGroup | None) -> None:
    """Everything that Megatron calls, with results that depend on every rank."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    total = size * (size + 1) / 2
    mine = torch.full((2,), float(rank + 1))

    reduced = mine.clone()
    dist.all_reduce(reduced, group=group)
    assert reduced.tolist() == [total, total]
    work = dist.all_reduce(reduced, op=dist.ReduceOp.MAX, group=group, async_op=True)
    work.wait()
    root = dist.get_process_group_ranks(group)[0]
    sent = mine.clone()
    dist.broadcast(sent, src=root, group=group)
    assert sent.tolist() == [1.0, 1.0]
    gathered = torch.empty(2 * size)
    dist.all_gather_into_tensor(gathered, mine, group=group)
    assert gathered.tolist() == [float(r + 1) for r in range(size) for _ in range(2)]
    parts = [torch.empty(2) for _ in range(size)]
    dist.all_gather(parts, mine, group=group)
    assert torch.cat(parts).equal(gathered)
    scattered = torch.empty(2)
    dist.reduce_scatter_tensor(scattered, gathered, group=group)
    assert scattered.tolist() == [size * (rank + 1.0)] * 2
    exchanged = torch.empty(size)
    dist.all_to_all_single(exchanged, torch.arange(size) + 10.0 * rank, group=group)
    assert exchanged.tolist() == [10.0 * r + rank for r in range(size)]
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank}, group=group)
    assert objects == [{"rank": r} for r in range(size)]
    dist.reduce(mine.clone(), dst=root, group=group)
    dist.barrier(group=group)
    if size > 1:
        _check_point_to_point(group, rank, size)


def _check_point_to_point(group: dist.ProcessGroup | None, rank: int, size: int) -> None:
    ranks = dist.get_process_group_ranks(group)
    after, before = ranks[(rank + 1) % size], ranks[(rank - 1) % size]
    received = torch.empty(1)
    operations = [
        dist.P2POp(dist.isend, torch.tensor([float(rank)]), after, group),
        dist.P2POp(dist.irecv, received, before, group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert received.item() == (rank - 1) % size
    if rank == 0:
        dist.send(torch.tensor([7.0]), after, group=group)
    elif rank == 1:
        dist.recv(received, before, group=group)
        assert received.item() == 7.0


def _destroy_and_reload(rank: int, world_size: int, store: str) -> None:
    _join(rank, world_size, store)
    permanent = distributed_utils.init_gloo_group()
    whole = dist.new_group(list(range(world_size)), group_desc="whole")
    singles = [dist.new_group([r], timeout=timedelta(seconds=33)) for r in range(world_size)]
    own = singles[rank]
    assert isinstance(whole, ReloadableProcessGroup) and isinstance(dist.group.WORLD, ReloadableProcessGroup)
    world = dist.group.WORLD
    for _ in range(2):
        for group in (None, world, whole, own, permanent):
            _check_collectives(group)
        reloadable_process_group.destroy_process_groups()
        reloadable_process_group.destroy_process_groups()  # a second time does nothing
        with pytest.raises(RuntimeError, match=r"whole.*destroyed while the trainer sleeps"):
            dist.all_reduce(torch.ones(1), group=whole)
        assert whole.size() == world_size and dist.get_rank(own) == 0
        _check_collectives(permanent)
        _check_collectives(None)  # the default group goes on as gloo
        reloadable_process_group.reload_process_groups()
        reloadable_process_group.reload_process_groups()
        assert dist.group.WORLD is world and dist.get_backend(whole) == "gloo"
    for group in (None, world, whole, own, permanent):
        _check_collectives(group)
    assert own.recipe.timeout == timedelta(seconds=33)
    assert own.alive()._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=33)


@pytest.mark.parametrize("world_size", [1, 2])
def test_groups_survive_destroy_and_reload_twice(world_size: int) -> None:
    """P16: also with one device."""
    run_ranks(_destroy_and_reload, world_size)


def _destroy_for_good(rank: int, world_size: int, store: str) -> None:
    _join(rank, world_size, store)
    first, second = dist.new_group(), dist.new_group()
    dist.destroy_process_group(first)
    reloadable_process_group.destroy_process_groups()
    reloadable_process_group.reload_process_groups()
    _check_collectives(second)
    with pytest.raises(ValueError, match="not initialized"):
        dist.all_reduce(torch.ones(1), group=first)
    later = dist.new_group()  # names go on matching between ranks
    _check_collectives(later)
    dist.destroy_process_group()
    assert not dist.is_initialized()
    dist.init_process_group("gloo", init_method=f"file://{store}2", rank=rank, world_size=world_size)
    _check_collectives(None)
    reloadable_process_group.destroy_process_groups()
    reloadable_process_group.reload_process_groups()
    _check_collectives(None)


def test_groups_can_be_destroyed_for_good() -> None:
    run_ranks(_destroy_for_good, 2)


def _only_one_rank_sleeps(rank: int, world_size: int, store: str) -> str:
    reloadable_process_group.monkey_patch_torch_dist()
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=1)
    )
    dist.new_group()
    if rank == 1:
        time.sleep(3)  # alive, but awake
        return ""
    with pytest.raises(RuntimeError) as error:
        reloadable_process_group.destroy_process_groups()
    return str(error.value)


def test_a_rank_that_does_not_join_in_is_an_error() -> None:
    message = run_ranks(_only_one_rank_sleeps, 2)[0]
    assert "only 1 of 2 ranks came to destroy their process groups" in message


def _patch_after_init(rank: int, world_size: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    reloadable_process_group.monkey_patch_torch_dist()
    group = dist.new_group()
    reloadable_process_group.destroy_process_groups()
    reloadable_process_group.reload_process_groups()
    _check_collectives(None)
    _check_collectives(group)


def test_patching_after_initialisation_covers_the_default_group() -> None:
    run_ranks(_patch_after_init, 2)
