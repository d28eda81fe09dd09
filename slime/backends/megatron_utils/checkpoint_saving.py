"""Writing checkpoints: at once, or in the background while training goes on."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from slime.backends.megatron_utils import atomic_directory, checkpoint_directory
from slime.backends.megatron_utils.checkpoint_state import generate_state, sharding_metadata
from slime.utils.accelerator import current

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
    from megatron.core.dist_checkpointing.strategies.base import AsyncSaveShardedStrategy
    from megatron.core.optimizer import MegatronOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

logger = logging.getLogger(__name__)


class CheckpointSaver:
    """Saves one model's training state below `args.save`; every rank has one, and every rank calls every method.

    A checkpoint is written under a hidden name and renamed when it is complete; then the tracker file names it, then
    `args.keep_checkpoints` decides which older ones go. A save that dies at any moment leaves the checkpoints before
    it as they were.

    In the background, `save` returns when the state is copied to host memory; a thread writes the copy. The checkpoint
    gets its name in the first `advance` that finds all ranks' threads done, or in `finish`.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        model: Sequence[torch.nn.Module],
        optimizer: MegatronOptimizer | None,
        scheduler: OptimizerParamScheduler | None,
    ) -> None:
        self._args = args
        self._training_state = (model, optimizer, scheduler)
        self._strategy: AsyncSaveShardedStrategy | None = None
        self._pending: _BackgroundWrite | None = None

    def save(self, iteration: int, *, in_background: bool = False, weight_version: int = 0) -> Path:
        """Write `args.save/iter_%07d`; the directory, which is complete when this returns unless `in_background`.

        `weight_version` is what the engines' weights are called, see `saved_weight_version`. A background write that
        is still going on is waited for first.

        Raises:
            RuntimeError: this write or the one before failed on some rank; the message says where and why.
        """
        self.finish()
        started = time.monotonic()
        self._strategy = self._strategy or make_strategy(self._args)
        directory = checkpoint_directory.iteration_directory(self._args.save, iteration)
        request = start_torch_dist(
            self._args, directory, iteration, *self._training_state, self._strategy, weight_version
        )
        self._pending = _BackgroundWrite(directory, iteration, request, copy=in_background)
        if in_background:
            _report("writing %s in the background; training waited %.1f s", directory, time.monotonic() - started)
        else:
            self.finish()
        return directory

    def advance(self) -> None:
        """Publish the background write if it has ended on every rank.

        Raises:
            RuntimeError: it failed.
        """
        if self._pending is not None and _all_ranks(self._pending.done()):
            self.finish()

    def finish(self) -> None:
        """Wait for the background write, if there is one, and publish it.

        Raises:
            RuntimeError: it failed; the checkpoints before it are as they were.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        pending.complete()
        if dist.get_rank() == 0:
            root = Path(self._args.save)
            checkpoint_directory.write_tracker(root, pending.iteration)
            if self._args.keep_checkpoints is not None:
                checkpoint_directory.delete_old_checkpoints(root, self._args.keep_checkpoints)
            checkpoint_directory.delete_leftovers(root)
        _report("saved %s in %.1f s", pending.directory, time.monotonic() - pending.started)
        dist.barrier()


@torch.no_grad()
def write_torch_dist(
    args: argparse.Namespace,
    directory: Path,
    iteration: int,
    model: Sequence[torch.nn.Module],
    optimizer: MegatronOptimizer | None,
    scheduler: OptimizerParamScheduler | None,
) -> None:
    """Write one checkpoint as `directory`, which appears when it is complete; the tracker file is not touched."""
    request = start_torch_dist(args, directory, iteration, model, optimizer, scheduler, make_strategy(args))
    _BackgroundWrite(directory, iteration, request, copy=False).complete()


def make_strategy(args: argparse.Namespace) -> AsyncSaveShardedStrategy:
    """How shards are written. It may be used again for the same model, and then remembers its plan
    (`args.ckpt_assume_constant_structure`)."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

    from slime.backends.megatron_utils.checkpoint_writer import InProcessTorchDistSave

    constant = args.ckpt_assume_constant_structure
    strategy = InProcessTorchDistSave(cached_metadata=constant)
    replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if replicas.size() > 1 and args.ckpt_fully_parallel_save:  # replicas share the writing
        return FullyParallelSaveStrategyWrapper(strategy, replicas, do_cache_distribution=constant)
    return strategy


@torch.no_grad()
def start_torch_dist(
    args: argparse.Namespace,
    directory: Path,
    iteration: int,
    model: Sequence[torch.nn.Module],
    optimizer: MegatronOptimizer | None,
    scheduler: OptimizerParamScheduler | None,
    strategy: AsyncSaveShardedStrategy,
    weight_version: int = 0,
) -> AsyncRequest:
    """Plan the write of a checkpoint to the staging directory of `directory`; what is left is the shards' data.

    `args.no_save_optim` leaves out the optimizer and the schedule, `args.no_save_rng` the random state.
    """
    from megatron.core import dist_checkpointing

    if dist.get_rank() == 0:
        atomic_directory.start_staging(directory)
    dist.barrier()
    metadata = sharding_metadata()
    state = generate_state(
        args,
        iteration,
        model,
        None if args.no_save_optim else optimizer,
        scheduler,
        with_rng=not args.no_save_rng,
        metadata=metadata,
        is_loading=False,
        weight_version=weight_version,
    )
    staging = str(atomic_directory.staging_path(directory))
    return dist_checkpointing.save(
        state, staging, strategy, async_sharded_save=True, content_metadata=_without_groups(metadata)
    )


@dataclasses.dataclass
class _BackgroundWrite:
    """One checkpoint on its way to disk: a thread that writes this rank's shards, and what follows when all are done.

    Args:
        copy: write a copy of the state, so that training may go on; else the caller waits.
    """

    directory: Path
    iteration: int
    request: AsyncRequest
    copy: bool

    def __post_init__(self) -> None:
        self.started = time.monotonic()
        self._failure: str | None = None
        buckets = self.request.preload_fn() if self.request.preload_fn is not None else []
        if self.copy:
            buckets = _copied(buckets, of=self.request.async_fn_args[1] if buckets else [])
        self._thread = threading.Thread(target=self._write, args=(buckets,), name="checkpoint-writer", daemon=True)
        self._thread.start()

    def done(self) -> bool:
        return not self._thread.is_alive()

    def complete(self) -> None:
        """Wait for this rank's thread, then for all ranks, and give the directory its name.

        Raises:
            RuntimeError: on every rank, if any failed.
        """
        self._thread.join()
        failures: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(failures, self._failure)
        failed = [f"rank {rank}: {failure}" for rank, failure in enumerate(failures) if failure is not None]
        if failed:
            raise RuntimeError(f"the checkpoint {self.directory} could not be written: {'; '.join(failed)}")
        for finalize in self.request.finalize_fns:
            finalize()
        if dist.get_rank() == 0:
            atomic_directory.publish_directory(self.directory)
        dist.barrier()

    def _write(self, buckets: list[Any]) -> None:
        if self.request.async_fn is None:  # nothing to write on this rank
            return
        try:
            rank, _, results = self.request.async_fn_args
            self.request.async_fn(rank, buckets, results, **self.request.async_fn_kwargs)
        except Exception as error:  # handed to `complete`, which raises it on every rank
            self._failure = f"{type(error).__name__}: {error}"


def _copied(buckets: list[Any], of: list[Any]) -> list[Any]:
    """`buckets` without tensors that share memory with the model's, in `of`; those of a device are copies already."""
    copies = []
    for (path, key, (data, staged)), (_, _, (_, originals)) in zip(buckets, of, strict=True):
        own = [
            (item, tensor.clone() if tensor.data_ptr() == original.data_ptr() else tensor)
            for (item, tensor), (_, original) in zip(staged, originals, strict=True)
        ]
        copies.append((path, key, (data, own)))
    return copies


def _without_groups(metadata: dict[str, Any]) -> dict[str, Any]:
    """Process groups mean nothing in a file."""
    return {name: value for name, value in metadata.items() if not isinstance(value, dist.ProcessGroup)}


def _all_ranks(value: bool) -> bool:
    flag = torch.tensor([int(value)], device=current().device())
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())


def _report(message: str, *values: object) -> None:
    """One log line for all ranks."""
    if dist.get_rank() == 0:
        logger.info(message, *values)
