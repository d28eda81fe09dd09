"""The pool of processes that parallel tests run in."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from tests.support.gloo_world import GlooWorld, GlooWorldError


def sum_of_ranks(scale: int) -> tuple[int, float]:
    import torch
    import torch.distributed as dist

    value = torch.tensor([float(dist.get_rank() * scale)])
    dist.all_reduce(value)
    return os.getpid(), value.item()


def layout_and_draw(tensor_parallel: int) -> tuple[int, int, float]:
    import torch
    from megatron.core import parallel_state

    assert not parallel_state.model_parallel_is_initialized()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
    return (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
        torch.rand(()).item(),
    )


def raise_on_rank_1() -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise KeyError("rank one is broken")
    dist.barrier()


def exit_on_rank_0() -> None:
    import torch.distributed as dist

    if dist.get_rank() == 0:
        os._exit(3)
    dist.barrier()


@pytest.fixture(scope="module")
def world(gloo_world: Callable[[int], GlooWorld]) -> GlooWorld:
    return gloo_world(2)


def test_ranks_work_together_and_stay_up(world: GlooWorld) -> None:
    first, second = world.run(sum_of_ranks, 1), world.run(sum_of_ranks, scale=10)
    assert [value for _, value in first] == [1.0, 1.0] and [value for _, value in second] == [10.0, 10.0]
    assert [pid for pid, _ in first] == [pid for pid, _ in second]


def test_each_call_finds_fresh_megatron_state_and_seeds(world: GlooWorld) -> None:
    tensor_parallel = world.run(layout_and_draw, 2)
    data_parallel = world.run(layout_and_draw, 1)
    assert [ranks[:2] for ranks in tensor_parallel] == [(0, 0), (1, 0)]
    assert [ranks[:2] for ranks in data_parallel] == [(0, 0), (0, 1)]
    assert len({draw for *_, draw in tensor_parallel + data_parallel}) == 1


def test_a_failing_rank_fails_the_call_in_bounded_time_and_the_pool_recovers(world: GlooWorld) -> None:
    with pytest.raises(GlooWorldError, match=r"rank 1: (?s:.*)rank one is broken"):
        world.run(raise_on_rank_1)
    with pytest.raises(GlooWorldError, match="rank 0: ended with status 3"):
        world.run(exit_on_rank_0)
    assert [value for _, value in world.run(sum_of_ranks, 1)] == [1.0, 1.0]
