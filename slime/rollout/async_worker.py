"""Generation that goes on between rollouts: groups in flight, groups that are ready, and nothing lost in between."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

from slime.rollout import weight_version
from slime.rollout.base_types import SampleGroup
from slime.rollout.data_source import copy_prompt
from slime.rollout.engine_abort import drain
from slime.rollout.generate_state import GenerateState
from slime.rollout.partial_rollout import can_continue, is_finished, is_unfinished, prepare_retry, reset_sample
from slime.rollout.sample_hooks import set_current_rollout_id
from slime.utils.async_utils import run
from slime.utils.http_utils import get_rollout_num_engines
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

KEPT_BATCHES = 2  # a checkpoint may be of the rollout before the one handed out last


@dataclass
class _Work:
    """A group on its way: as it was before this attempt, and what came out."""

    origin: list[Sample]
    result: SampleGroup | None = None

    @property
    def group(self) -> SampleGroup:
        return self.origin if self.result is None else self.result


class AsyncRolloutWorker:
    """Keeps groups in generation on the process's event loop until it is stopped.

    It tops up after each group that ends, so no thread waits. Every group that it took from the data source is in
    flight, held (while paused), ready, or handed out; a checkpoint of the data source contains all of them that the
    checkpoint's rollout has not trained on.

    Args:
        data_buffer: the data source.
        concurrency: groups in flight; by default as many as the engines' --sglang-server-concurrency has room for.
    """

    def __init__(self, args: Any, data_buffer: Any, concurrency: int | None = None) -> None:
        self.args, self.data_source = args, data_buffer
        room = args.sglang_server_concurrency * max(1, get_rollout_num_engines(args)) // args.n_samples_per_prompt
        self.concurrency = concurrency or max(1, room)
        self.rollout_id: int | None = None
        self.version = 0
        self.counts: Counter[str] = Counter()
        self._lock = getattr(data_buffer, "lock", None) or threading.RLock()
        self._in_flight: dict[asyncio.Task[Any], _Work] = {}
        self._held: list[_Work] = []
        self._ready: deque[_Work] = deque()
        self._handed: dict[int, list[_Work]] = {}
        self._failure: BaseException | None = None
        self._paused = True
        self._news = asyncio.Event()
        if hasattr(data_buffer, "outstanding"):
            data_buffer.outstanding = self.outstanding
        else:
            logger.warning(
                "%s has no attribute `outstanding`: checkpoints won't hold the groups that are in flight or ready",
                type(data_buffer).__name__,
            )

    @property
    def most_outstanding(self) -> int:
        """Groups that may be in flight or ready: with --max-staleness no more than are used before they are stale."""
        limit = self.concurrency + self.args.rollout_batch_size
        if self.args.max_staleness is None:
            return limit
        return min(limit, (self.args.max_staleness + 1) * self.args.rollout_batch_size)

    def start(self) -> None:
        """Begin, from any thread."""
        run(self.resume())

    def stop(self) -> None:
        """End all generation, from any thread; what is not handed out goes back to the data source."""
        run(self._stop())

    def queue_size(self) -> int:
        """Groups that are ready."""
        return len(self._ready)

    def in_flight(self) -> int:
        """Groups in generation."""
        return len(self._in_flight)

    def take_counts(self) -> dict[str, int]:
        """What was counted since the last call, by metric name."""
        counts, self.counts = dict(self.counts), Counter()
        return counts

    def get_completed_groups(self, limit: int | None = None) -> list[SampleGroup]:
        """Take up to `limit` ready groups, oldest first, without waiting; they are the caller's from then on."""
        return run(self._take_ready(limit))

    async def next_group(self, rollout_id: int) -> SampleGroup:
        """Wait for a group; it counts as handed out to rollout `rollout_id`.

        Raises:
            Exception: what made a group's generation fail.
        """
        while not self._ready:
            self._raise_failure()
            self._news.clear()
            await self._news.wait()
        with self._lock:
            work = self._ready.popleft()
            self._handed.setdefault(rollout_id, []).append(work)
        self._top_up()
        return work.group

    def begin(self, rollout_id: int, version: int) -> None:
        """Rollout `rollout_id` begins, with engines that have weights `version`."""
        self.rollout_id, self.version = rollout_id, version
        if hasattr(self.data_source, "rollout_id"):
            self.data_source.rollout_id = rollout_id
        with self._lock:
            for old in [key for key in self._handed if key <= rollout_id - KEPT_BATCHES]:
                del self._handed[old]
        self._raise_failure()
        self._top_up()

    def give_back(self, rollout_id: int, group: SampleGroup) -> None:
        """Return a group that was handed out, as bare prompts, to be generated anew."""
        with self._lock:
            works = self._handed[rollout_id]
            work = next(work for work in works if work.group is group)
            works.remove(work)
            for sample in work.origin:
                reset_sample(sample)
            self.data_source.add_samples([work.origin])

    async def pause(self) -> None:
        """Abort what is in generation and hold it; returns once the engines are idle, in bounded time."""
        self._paused = True
        state = GenerateState(self.args)
        state.aborted = True
        await drain(self.args, set(self._in_flight))
        await asyncio.sleep(0)  # the tasks' callbacks
        state.aborted = False

    async def resume(self) -> None:
        """Go on with what was held, and with new groups."""
        self._paused = False
        with self._lock:
            held, self._held = self._held, []
        for work in held:
            self._submit(work.origin)
        self._top_up()

    def outstanding(self, rollout_id: int) -> list[dict[str, Any] | list[Any]]:
        """What a checkpoint after `rollout_id` must hold, as nested lists of dicts; called from any thread."""
        with self._lock:
            later = [work for key, works in self._handed.items() if key > rollout_id for work in works]
            works = [*later, *self._ready, *self._held, *self._in_flight.values()]
            return [self._to_dicts(work.group) for work in works]

    def _to_dicts(self, group: SampleGroup) -> list[Any]:
        dicts = [[s.to_dict() for s in item] if isinstance(item, list) else item.to_dict() for item in group]
        born = weight_version.oldest_version(group)
        if born is not None:  # the process that resumes starts with the weights that come after the engines'
            leaves = [leaf for item in dicts for leaf in (item if isinstance(item, list) else [item])]
            weight_version.carry_staleness(leaves, self.version - born + 1)
        return dicts

    # -- on the event loop --------------------------------------------------------------------------------------------

    def _top_up(self) -> None:
        while not self._paused and self._failure is None:
            with self._lock:
                room = self.most_outstanding - len(self._in_flight) - len(self._ready)
                if room <= 0 or len(self._in_flight) >= self.concurrency:
                    return
                try:
                    (group,) = self.data_source.get_samples(1)
                except Exception as error:  # raised by whoever waits: here the event loop would only log it
                    self._failure = error
                    self._news.set()
                    return
                weight_version.adopt(group, self.version)
                self._submit(group)

    def _submit(self, group: SampleGroup) -> None:
        with self._lock:
            if all(is_finished(item) for item in group):  # of a checkpoint: nothing is left to generate
                self._ready.append(_Work(group, group))
                self._news.set()
                return
            work = _Work([copy_prompt(sample) for sample in group])
            task = asyncio.get_running_loop().create_task(self._generate(group))
            self._in_flight[task] = work
            task.add_done_callback(self._ended)

    async def _generate(self, group: SampleGroup) -> SampleGroup:
        from slime.rollout import sglang_rollout  # plug-ins replace its functions

        set_current_rollout_id(self.rollout_id)
        params = GenerateState(self.args).sampling_params.copy()
        return await sglang_rollout.generate_and_rm_group(self.args, group, params, evaluation=False)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        with self._lock:
            work = self._in_flight.pop(task, None)
            if work is None:
                return  # stopped
            if task.cancelled():
                self._held.append(work)
            elif (error := task.exception()) is not None:
                self._failure = error
            elif not all(is_finished(item) for item in task.result()):
                self._again(work, task.result())
            else:
                work.result = task.result()
                self._ready.append(work)
        self._news.set()
        self._top_up()

    def _again(self, work: _Work, group: SampleGroup) -> None:
        """An engine aborted the group: go on with it, with the tokens so far under --partial-rollout."""
        self.counts["rollout/aborted_groups_retried"] += 1
        if not can_continue(group):  # the parts of a fan-out can't be told apart: begin at the prompt
            group = work.origin
        keep = self.args.partial_rollout
        if self._paused:
            for sample in group if not keep else []:
                if is_unfinished(sample):
                    reset_sample(sample)
            self._held.append(_Work(group))
            return
        try:
            prepare_retry(group, keep_tokens=keep)
        except RuntimeError as error:
            self._failure = error
            return
        self._submit(group)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def _take_ready(self, limit: int | None) -> list[SampleGroup]:
        with self._lock:
            count = len(self._ready) if limit is None else min(limit, len(self._ready))
            groups = [self._ready.popleft().group for _ in range(count)]
        self._raise_failure()
        self._top_up()
        return groups

    async def _stop(self) -> None:
        self._paused = True
        with self._lock:
            works = [*self._ready, *self._held, *self._in_flight.values()]
            tasks, self._in_flight = list(self._in_flight), {}
            self._ready.clear()
            self._held = []
            if hasattr(self.data_source, "outstanding"):
                self.data_source.outstanding = None
            self.data_source.add_samples([work.group for work in works])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
