"""A process group of one trainer rank and the ranks of all engines, over which buckets of weights are broadcast.

Its engines side is SGLang's: POST /init_weights_update_group, /update_weights_from_distributed (load_format
flattened_bucket) and /destroy_weights_update_group. Written for sglang 0.5.23.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import ray
import torch
import torch.distributed as dist
from torch import Tensor

from slime.backends.megatron_utils.update_weight.tensor_payload import LOAD_FORMAT, fill
from slime.ray.utils import acquire, get_all, release
from slime.utils import accelerator
from slime.utils.distributed_utils import init_process_group
from slime.utils.host_info import get_host_info

logger = logging.getLogger(__name__)

NamedTensors = Sequence[tuple[str, Tensor]]

LEAVE_SECONDS = 20.0
_POLL_SECONDS = 0.01
_numbers = itertools.count()  # a name is never used twice: an engine may still be in an earlier group
_parked: list[dist.ProcessGroup] = []  # groups whose last broadcast has not ended: to destroy them would wait for it


class BroadcastGroup:
    """Rank 0 of the group is this process; the others are the engines' tensor-parallel ranks.

    Requests to the engines and the broadcast run side by side, and only the answers are waited for, so that an engine
    that refuses ends the wait at once, with what it answered. NCCL and HCCL (not tried so far) make their
    communicator in a group's first broadcast: if an engine refuses just that one, their own deadline counts.

    Args:
        name: of the log and the engines; a number is added.
        engines: actor handles.
        ranks_of_each: tensor-parallel ranks of each engine.
        lock: the actor that lets one sender at a time speak to the engines; with two, each engine could be waiting in
            another one's broadcast.
        seconds: deadline of joining, and of each broadcast.

    Raises:
        Exception: the engine's error, or TimeoutError.
    """

    def __init__(
        self, name: str, engines: Sequence[Any], ranks_of_each: Sequence[int], lock: Any, seconds: float
    ) -> None:
        self.name = f"{name}-{next(_numbers)}"
        self._engines = engines
        self._lock = lock
        self._seconds = seconds
        self._left = False
        self._on_wire: tuple[list[ray.ObjectRef], dist.Work] | None = None
        self._flats = [torch.empty(0, dtype=torch.uint8, device=accelerator.current().device()) for _ in range(2)]
        acquire(lock, self.name, seconds)
        try:
            self._group = self._join(ranks_of_each)
        finally:
            release(lock)

    def _join(self, ranks_of_each: Sequence[int]) -> dist.ProcessGroup:
        world_size, limit = 1 + sum(ranks_of_each), timedelta(seconds=self._seconds)
        backend, address = accelerator.current().weight_update_backend, get_host_info()[1]
        store = dist.TCPStore(address, 0, world_size, is_master=True, wait_for_workers=False, timeout=limit)
        offsets = itertools.accumulate(ranks_of_each, initial=1)
        refs = [
            engine.init_weights_update_group.remote(address, store.port, offset, world_size, self.name, backend)
            for engine, offset in zip(self._engines, offsets, strict=False)
        ]
        made: list[dist.ProcessGroup] = []

        def make() -> None:
            prefixed = dist.PrefixStore(self.name, store)
            with suppress(RuntimeError):  # an engine did not come: its answer says why
                made.append(
                    init_process_group(
                        backend, store=prefixed, rank=0, world_size=world_size, group_name=self.name, timeout=limit
                    )
                )

        maker = threading.Thread(target=make, name=f"join {self.name}", daemon=True)
        maker.start()
        get_all(refs, timeout=self._seconds, what=f"joining of the engines to {self.name}")
        maker.join(self._seconds)
        if not made:
            raise TimeoutError(f"{self.name}: the trainer did not get to the engines within {self._seconds:.0f} s")
        logger.info("%s: %d engine ranks on %d engines, %s", self.name, world_size - 1, len(self._engines), backend)
        return made[0]

    def send(self, tensors: NamedTensors) -> None:
        """Put a bucket on the wire, once the one before has arrived. The tensors may change afterwards.

        Raises:
            Exception: what `finish` raises, for the bucket before.
        """
        ordered, places, size = wire_layout(tensors)
        flat = fill(self._next_flat(size), ordered, places)
        self._await_wire()
        acquire(self._lock, self.name, self._seconds)
        refs = [
            engine.update_weights_from_distributed.remote(
                [name for name, _ in ordered],
                [str(tensor.dtype) for _, tensor in ordered],
                [list(tensor.shape) for _, tensor in ordered],
                self.name,
                load_format=LOAD_FORMAT,
            )
            for engine in self._engines
        ]
        self._on_wire = refs, dist.broadcast(flat, group=self._group, group_src=0, async_op=True)

    def finish(self) -> None:
        """Wait until every engine has loaded the last bucket, and give back the buffers' memory.

        Raises:
            Exception: an engine's error, or TimeoutError. The group is gone then.
        """
        self._await_wire()
        self._flats = [flat[:0].clone() for flat in self._flats]

    def _await_wire(self) -> None:
        if self._on_wire is None:
            return
        (refs, work), self._on_wire = self._on_wire, None
        try:
            get_all(refs, timeout=self._seconds, what=f"a bucket of weights over {self.name}")
            work.wait()
        except Exception:
            self._abandon(work)
            raise
        finally:
            release(self._lock)

    def leave(self) -> None:
        """Take engines and this process out of the group, once; an engine that is gone doesn't matter."""
        if self._left:
            return
        self._left = True
        _ended([engine.destroy_weights_update_group.remote(self.name) for engine in self._engines])
        dist.destroy_process_group(self._group)

    def _abandon(self, work: dist.Work) -> None:
        """Leave a group whose broadcast goes nowhere.

        The engines go first: one that isn't in the broadcast closes its connections, which ends it here; then those
        that are in it hear that this process is gone.
        """
        self._left = True
        refs = [engine.destroy_weights_update_group.remote(self.name) for engine in self._engines]
        backend = self._group._get_backend(accelerator.current().device())
        backend.abort()  # for gloo nothing, for NCCL and HCCL what ends it
        deadline = time.monotonic() + LEAVE_SECONDS
        while not work.is_completed() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        if work.is_completed():
            dist.destroy_process_group(self._group)
        else:
            _parked.append(self._group)
        _ended(refs)

    def _next_flat(self, size: int) -> Tensor:
        """`size` bytes of a buffer that is not on the wire."""
        self._flats.reverse()
        if self._flats[0].numel() < size:
            self._flats[0] = torch.empty(size, dtype=torch.uint8, device=self._flats[0].device)
        return self._flats[0][:size]


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in a flat bucket, in bytes."""

    start_idx: int
    end_idx: int
    dtype: torch.dtype
    shape: torch.Size


def wire_layout(tensors: NamedTensors) -> tuple[list[tuple[str, Tensor]], list[Place], int]:
    """The tensors in the order of a flat bucket, where each lies, and the bucket's bytes.

    SGLang's layout has no gaps and wants each tensor at a multiple of its element size: large elements come first.
    """
    ordered = sorted(tensors, key=lambda named: -named[1].element_size())
    places, end = [], 0
    for _, tensor in ordered:
        start, end = end, end + tensor.numel() * tensor.element_size()
        places.append(Place(start, end, tensor.dtype, tensor.shape))
    return ordered, places, end


def _ended(refs: list[ray.ObjectRef]) -> None:
    """Wait for engines that may be gone, at most LEAVE_SECONDS."""
    try:
        get_all(refs, timeout=LEAVE_SECONDS, what="leaving of the engines")
    except Exception as error:
        logger.warning("an engine did not leave its weight group: %s", getattr(error, "cause", None) or error)
