"""Megatron's torch_dist writer without helper processes.

Written for megatron-core 0.16.1. Its writer hands results over in a queue that a spawned manager process owns (that
process imports the training script again: 6 to 28 s per run) and forks one process per file out of a process full of
threads. A save needs neither: this strategy writes the same files from threads of this process, and the results
travel in an ordinary queue. Megatron's own background writer forks too, and asks for a CUDA device.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

_RELIED_ON = {
    filesystem_async: ("_results_queue", "_get_write_results_queue"),
    FileSystemWriterAsync: ("write_preloaded_data", "preload_tensors", "retrieve_write_results"),
    TorchDistSaveShardedStrategy: ("async_save", "_get_save_and_finalize_callbacks"),
}


class InProcessTorchDistSave(TorchDistSaveShardedStrategy):
    """`torch_dist` save strategy (format version 1); the files are Megatron's own format.

    `async_fn` of its requests may run in a thread, and raises what went wrong.
    """

    def __init__(self, thread_count: int = 2, cached_metadata: bool = False) -> None:
        _check_upstream()
        super().__init__("torch_dist", 1, thread_count=thread_count, cached_metadata=cached_metadata)

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> AsyncRequest:
        with _local_results_queue():
            return super().async_save(sharded_state_dict, checkpoint_dir)

    def _get_save_and_finalize_callbacks(
        self, writer: FileSystemWriterAsync, save_state_dict_ret: Any
    ) -> AsyncRequest:
        request = super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret)
        if request.async_fn is None:  # nothing to write on this rank
            return request
        transforms = [writer.transforms] if hasattr(writer, "transforms") else []

        def write(rank: int, buckets: list[Any], results: queue.Queue[Any]) -> None:
            outcome = _write_buckets(transforms, buckets)
            if isinstance(outcome, Exception):
                raise outcome
            results.put(outcome)

        return request._replace(async_fn=write)


def _write_buckets(transforms: list[Any], buckets: list[Any]) -> dict[int, Any] | Exception:
    """Each bucket to its file; {bucket: write results}, or the first error, as the reader of the queue expects."""
    with ThreadPoolExecutor(max_workers=len(buckets)) as pool:
        jobs = [pool.submit(_write_bucket, transforms, index, bucket) for index, bucket in enumerate(buckets)]
        outcomes = [job.result() for job in jobs]
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            return outcome
    return dict(enumerate(outcomes))


def _write_bucket(transforms: list[Any], index: int, bucket: Any) -> Any:
    results, unfinished = queue.Queue[Any](), queue.Queue[int]()
    unfinished.put(index)
    FileSystemWriterAsync.write_preloaded_data(transforms, index, bucket, results, unfinished, True)
    return results.get_nowait()[1]


@contextlib.contextmanager
def _local_results_queue() -> Iterator[None]:
    """Megatron creates its manager process when this module variable is empty, so it isn't."""
    before = filesystem_async._results_queue
    filesystem_async._results_queue = queue.Queue()
    try:
        yield
    finally:
        filesystem_async._results_queue = before


def _check_upstream() -> None:
    import megatron.core

    for owner, names in _RELIED_ON.items():
        missing = [name for name in names if not hasattr(owner, name)]
        if missing:
            raise RuntimeError(
                f"megatron-core {megatron.core.__version__}: {owner.__name__} has no {', '.join(missing)}; "
                "slime's checkpoint_writer was written for 0.16.1"
            )
