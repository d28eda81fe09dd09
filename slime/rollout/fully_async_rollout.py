"""A rollout function whose generation never waits for training: a worker keeps the engines busy between rollouts.

    --rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async --max-staleness 2

Works under both drivers. Where trainers and engines share devices (`--colocate`) generation is held while the
trainers have them.
"""

from __future__ import annotations

import time
import weakref
from argparse import Namespace
from typing import Any

from slime.rollout import sglang_rollout
from slime.rollout.async_worker import AsyncRolloutWorker
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput, keeps_generating
from slime.rollout.group_collector import GroupCollector
from slime.rollout.weight_version import current_weight_version, newest_version, oldest_version
from slime.utils.async_utils import run

__all__ = ["AsyncRolloutWorker", "generate_rollout_fully_async", "worker_of"]

_workers: weakref.WeakKeyDictionary[Any, AsyncRolloutWorker] = weakref.WeakKeyDictionary()
"""Data source → its worker: a rollout function has no other place for what outlives its calls."""


def worker_of(args: Namespace, data_source: Any) -> AsyncRolloutWorker:
    """The worker that draws on this data source; made at the first call."""
    if data_source not in _workers:
        _workers[data_source] = AsyncRolloutWorker(args, data_source)
    return _workers[data_source]


@keeps_generating
def generate_rollout_fully_async(
    args: Namespace, rollout_id: int, data_buffer: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """The next rollout_batch_size groups, oldest first, that are ready and pass the dynamic filter.

    What is ready beyond them is served by the next call. With `--max-staleness` a group whose oldest token was sampled
    more weight updates ago goes back to the data source as bare prompts. Evaluations run beside the generation.

    Raises:
        Exception: what made a group's generation fail, at the call after it happened or during it.
    """
    if evaluation:
        return run(sglang_rollout.eval_rollout(args, rollout_id))[0]
    return run(_collect_batch(args, rollout_id, worker_of(args, data_buffer)))


# What the asynchronous driver asks: it sends weights without waiting for the rollout that has begun.
generate_rollout_fully_async.keeps_generating = True  # type: ignore[attr-defined]


async def _collect_batch(args: Namespace, rollout_id: int, worker: AsyncRolloutWorker) -> RolloutFnTrainOutput:
    began = time.monotonic()
    version = await current_weight_version(args)
    worker.begin(rollout_id, version)
    await worker.resume()
    collector, ages = GroupCollector(args), []
    try:
        while not collector.full:
            group = await worker.next_group(rollout_id)
            version = max(version, newest_version(group))
            oldest = oldest_version(group)
            age = 0 if oldest is None else version - oldest
            if args.max_staleness is not None and age > args.max_staleness:
                collector.count("rollout/fully_async/stale_groups")
                worker.give_back(rollout_id, group)
            elif collector.add(group, collector.target + 1):  # the worker tops up: a batch is never short for good
                ages.append(age)
        if args.offload_rollout:
            await worker.pause()
    finally:
        collector.close()
    output = sglang_rollout.finish_batch(args, collector, worker.data_source)
    output.metrics = (
        (output.metrics or {})
        | worker.take_counts()
        | {
            "rollout/fully_async/staleness_max": max(ages),
            "rollout/fully_async/staleness_mean": sum(ages) / len(ages),
            "rollout/fully_async/groups_ready": worker.queue_size(),
            "rollout/fully_async/groups_in_flight": worker.in_flight(),
            "rollout/fully_async/wait_time": time.monotonic() - began,
        }
    )
    return output
