"""What generation shares within a process: tokenizer, concurrency limit, sampling parameters, and running groups."""

from __future__ import annotations

import asyncio
from functools import lru_cache, partial
from typing import Any

from slime.rollout.engine_choice import EngineList
from slime.utils.http_utils import get_rollout_num_engines
from slime.utils.misc import SingletonMeta
from slime.utils.processing_utils import load_processor, load_tokenizer

ENCODED_PROMPTS = 1024  # whose ids are remembered


class GenerateState(metaclass=SingletonMeta):
    """One per process: custom generate functions reach it with `GenerateState(args)`.

    Attributes:
        engines: the engines behind the router, for requests that can't go through it.
        semaphore: bounds the samples in generation, sglang_server_concurrency per engine.
        sampling_params: the training rollout's; copy before changing.
        encode: prompt text → token ids, remembered for the other answers of its group.
        aborted: the batch is full (or the rollout failed): start nothing new, finish quickly.
        pendings: tasks of groups in flight.
        remaining_batch_size: groups submitted and not dropped, those that are done included.
    """

    def __init__(self, args: Any) -> None:
        self.args = args
        self.tokenizer = load_tokenizer(args.hf_checkpoint, trust_remote_code=True)
        self.processor = load_processor(args.hf_checkpoint, trust_remote_code=True)
        self.engines = EngineList()
        self.semaphore = asyncio.Semaphore(args.sglang_server_concurrency * max(1, get_rollout_num_engines(args)))
        self.sampling_params = base_sampling_params(args) | {
            "temperature": args.rollout_temperature,
            "top_p": args.rollout_top_p,
            "top_k": args.rollout_top_k,
            "max_new_tokens": args.rollout_max_response_len,
            "stop": args.rollout_stop,
            "stop_token_ids": args.rollout_stop_token_ids,
            "skip_special_tokens": args.rollout_skip_special_tokens,
        }
        self.encode = lru_cache(ENCODED_PROMPTS)(partial(self.tokenizer.encode, add_special_tokens=False))
        self.reset()

    def reset(self) -> None:
        """Forget the last rollout's tasks."""
        self.remaining_batch_size = 0
        self.pendings: set[asyncio.Task[Any]] = set()
        self.task_groups: dict[asyncio.Task[Any], list[Any]] = {}
        self.aborted = False

    def submit_generate_tasks(self, samples: list[list[Any]]) -> None:
        """Start a task per group."""
        from slime.rollout import sglang_rollout  # plug-ins replace its functions

        for group in samples:
            task = asyncio.create_task(
                sglang_rollout.generate_and_rm_group(self.args, group, self.sampling_params.copy(), evaluation=False)
            )
            self.pendings.add(task)
            self.task_groups[task] = group
        self.remaining_batch_size += len(samples)


def base_sampling_params(args: Any) -> dict[str, Any]:
    """What is the same in every request: text comes back as it was sampled."""
    return {"no_stop_trim": True, "spaces_between_special_tokens": False}
