"""Rewards: user functions, a remote service, or the rule graders of `graders`."""

from __future__ import annotations

import asyncio
import functools
import logging
import random
from collections.abc import Iterable
from typing import Any

from slime.rollout.rm_hub.deepscaler import MARKERS
from slime.rollout.rm_hub.errors import GraderError, GraderTimeout, UngradableRow
from slime.rollout.rm_hub.failures import FAILURE_KEY, FAILURE_REASON_KEY, grader_failures, throttled_warning
from slime.rollout.rm_hub.grader_pool import grader_pool
from slime.rollout.rm_hub.graders import GRADERS
from slime.rollout.sample_hooks import accepted_kwargs
from slime.utils.misc import load_function
from slime.utils.processing_utils import without_final_special_tokens
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

BOXED_PREFIX = "boxed_"
REMOTE_LIMIT_S = 120.0


async def async_rm(args: Any, sample: Sample, **kwargs: Any) -> Any:
    """The reward of one sample.

    `Sample.custom_rm_path`, then `--custom-rm-path`, then the rule of `metadata["rm_type"]` or `--rm-type`. A rule
    grader that raises or exceeds `args.rm_timeout` seconds scores 0 (dapo: -1); `metadata["grader_failure"]` says so.

    Raises:
        ValueError: no reward is configured, the type is unknown, or label and metadata lack what the rule needs.
        RuntimeError: the remote reward gave no answer in time (see `remote_rm`).
        GraderUnavailable: what the rule needs can't be imported.
    """
    path = sample.custom_rm_path or args.custom_rm_path
    if path:
        function = load_function(path)
        return await function(args, sample, **accepted_kwargs(function, kwargs))
    rm_type = rm_type_of(args, sample)
    if rm_type == "remote_rm":
        return await remote_rm(args, sample)
    if rm_type == "random":
        return random.randint(0, 1)
    return await _rule_reward(args, sample, rm_type)


async def batched_async_rm(args: Any, samples: list[Sample], **kwargs: Any) -> list[Any]:
    """The rewards of several samples: one call of the custom function, or each by its own rule.

    Raises:
        ValueError: the custom function returned another number of rewards.
    """
    path = args.custom_rm_path
    if not path or any(sample.custom_rm_path for sample in samples):
        return list(await asyncio.gather(*(async_rm(args, sample, **kwargs) for sample in samples)))
    function = load_function(path)
    rewards = await function(args, samples, **accepted_kwargs(function, kwargs))
    if not isinstance(rewards, (list, tuple)) or len(rewards) != len(samples):
        got = len(rewards) if isinstance(rewards, (list, tuple)) else type(rewards).__name__
        raise ValueError(f"{path} must return a list of {len(samples)} rewards for {len(samples)} samples, got {got}")
    return list(rewards)


def rm_types() -> list[str]:
    """What `--rm-type` may be; most also with the prefix `boxed_`."""
    return sorted([*GRADERS, "remote_rm", "random"])


def rm_type_of(args: Any, sample: Sample) -> str:
    """The sample's rm type, of its metadata or `--rm-type`."""
    return str(sample.metadata.get("rm_type") or args.rm_type or "").strip()


def answer_text(args: Any, sample: Sample) -> str:
    """What rules grade: the response without the stop token's text, which `no_stop_trim` keeps in it."""
    return without_final_special_tokens(sample.response, args.hf_checkpoint) if args.hf_checkpoint else sample.response


def start_graders(args: Any) -> None:
    """Start the workers of the rule types that a run is going to use, so that its first gradings don't wait."""
    names = {args.rm_type, *(dataset.rm_type for dataset in getattr(args, "eval_datasets", None) or [])}
    for name in sorted(name.strip().removeprefix(BOXED_PREFIX) for name in names if name):
        if name in GRADERS:
            grader_pool().start(name)


async def _rule_reward(args: Any, sample: Sample, rm_type: str) -> Any:
    boxed = rm_type.startswith(BOXED_PREFIX)
    name = rm_type.removeprefix(BOXED_PREFIX)
    grader = GRADERS.get(name)
    if grader is None:
        raise ValueError(f"{sample.name()}: no reward for rm type {rm_type!r}; set --rm-type to one of {rm_types()}")
    if grader.needs_label and sample.label is None:
        raise ValueError(f"{sample.name()} has no label, rm type {rm_type} needs one (--label-key)")
    try:
        text = answer_text(args, sample)
        return await grader_pool().grade(args.rm_timeout, name, boxed, text, sample.label, sample.metadata)
    except UngradableRow as error:
        raise ValueError(f"{sample.name()}: {error} (--metadata-key, --label-key)") from None
    except GraderError as error:
        sample.metadata[FAILURE_KEY] = "timeout" if isinstance(error, GraderTimeout) else "error"
        sample.metadata[FAILURE_REASON_KEY] = str(error)
        throttled_warning(f"{sample.name()}: grading failed and scores {grader.failed}: {error}")
        return dict(grader.failed) if isinstance(grader.failed, dict) else grader.failed


async def remote_rm(args: Any, sample: Sample, max_retries: int = 10) -> Any:
    """The JSON answer of `--rm-url` to {prompt, response, label}.

    Connections are pooled; one that fails, and statuses that ask for it, are tried again up to `max_retries` times.
    All of that takes at most 120 s, or `--rm-timeout` where that is longer.

    Raises:
        ValueError: there is no `--rm-url`.
        RuntimeError: no answer in that time, or an error status; names the sample, the URL and the answer.
    """
    from slime.utils.http_utils import HttpError, post

    if not args.rm_url:
        raise ValueError("rm type remote_rm needs --rm-url")
    limit = max(REMOTE_LIMIT_S, args.rm_timeout)
    payload = {"prompt": sample.prompt, "response": sample.response, "label": sample.label}
    try:
        async with asyncio.timeout(limit):
            return await post(args.rm_url, payload, max_retries=max_retries, timeout=limit, retry_seconds=limit)
    except TimeoutError:
        raise RuntimeError(f"{sample.name()}: no reward from {args.rm_url} in {limit:g} s") from None
    except HttpError as error:
        raise RuntimeError(f"{sample.name()}: no reward: {error}") from error


def grader_metrics(samples: Iterable[Sample]) -> dict[str, int]:
    """How many gradings failed: `rollout/grader_timeout` and `rollout/grader_error`, where not zero."""
    return {f"rollout/{kind}": count for kind, count in grader_failures(samples).items()}


def warn_without_marker(args: Any, samples: list[Sample]) -> None:
    """Say once when no response of a deepscaler batch has the reasoning marker without which all score 0."""
    if args.custom_rm_path:
        return
    graded = [sample for sample in samples if rm_type_of(args, sample) == "deepscaler"]
    if graded and not any(marker in sample.response for sample in graded for marker in MARKERS):
        _warn_once(
            f"none of {len(graded)} responses has {' or '.join(MARKERS)}: rm type deepscaler scores them all 0."
            " For a model that doesn't think use --rm-type math"
        )


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)
