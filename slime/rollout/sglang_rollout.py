"""The default rollout and evaluation: prompts → engines over HTTP → rewards → groups.

Plug-ins replace the functions of this module, so they are looked up here at each call.
"""

from __future__ import annotations

import asyncio
import uuid
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from slime.observability.trace_utils import build_sglang_meta_trace_attrs, trace_span
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput, SampleGroup
from slime.rollout.engine_abort import drain
from slime.rollout.engine_choice import generate_url
from slime.rollout.engine_request import (
    next_payload,
    read_output,
    request_headers,
    retry_limits,
    router_url,
    sampling_seed,
)
from slime.rollout.eval_rollout import eval_rollout_single_dataset
from slime.rollout.generate_state import GenerateState
from slime.rollout.group_collector import GroupCollector
from slime.rollout.hook_errors import hook_errors
from slime.rollout.partial_rollout import (
    can_continue,
    is_unfinished,
    mark_for_continuation,
    mask_off_policy_part,
    prepare_retry,
    reset_sample,
)
from slime.rollout.rm_hub import async_rm, batched_async_rm
from slime.rollout.sample_checks import check_reward, custom_reward, generate_hook
from slime.rollout.sample_hooks import apply_rollout_sample_hooks, keyword_names, set_current_rollout_id
from slime.utils.async_utils import run
from slime.utils.eval_config import resolve_eval_datasets
from slime.utils.http_utils import HttpError, post
from slime.utils.misc import load_function
from slime.utils.types import Sample

__all__ = [
    "GenerateState",
    "abort",
    "eval_rollout",
    "eval_rollout_single_dataset",
    "generate",
    "generate_and_rm",
    "generate_and_rm_group",
    "generate_rollout",
    "generate_rollout_async",
    "get_model_url",
]


def get_model_url(args: Namespace, model_name: str, endpoint: str = "/generate") -> str:
    """Address of a model's router (`--sglang-config` names models); the only router where none are named.

    Raises:
        KeyError: models are named, and this isn't one of them.
    """
    routers = getattr(args, "sglang_model_routers", None)
    if not routers:
        return router_url((args.sglang_router_ip, args.sglang_router_port), endpoint)
    if model_name not in routers:
        raise KeyError(f"no model {model_name!r} is served; there are {sorted(routers)}")
    return router_url(tuple(routers[model_name]), endpoint)


async def generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Sample the (rest of the) answer from an engine: ids in, ids and log-probs out, status from the finish reason.

    A sample that has a part of its answer goes on behind it, with what is left of its budget; without any left it is
    TRUNCATED and no request is sent.
    """
    state = GenerateState(args)
    resumed = sample.response_length > 0
    payload = next_payload(args, state, sample, sampling_params)
    if payload is None:
        return sample
    url = await generate_url(args, state.engines, sample)
    with trace_span(sample, "sglang_generate") as span:
        output = await _request(args, sample, url, payload)
        span.update(build_sglang_meta_trace_attrs(output["meta_info"]))
    tokens, log_probs = read_output(args, sample, output, payload)
    sample.append_response_tokens(
        args, tokens=tokens, log_probs=log_probs, meta_info=output["meta_info"], text=output.get("text", "")
    )
    if resumed:  # a character may have been cut in two
        response_ids = sample.tokens[len(sample.tokens) - sample.response_length :]
        skip = sampling_params.get("skip_special_tokens", False)
        sample.response = state.tokenizer.decode(response_ids, skip_special_tokens=skip)
    return sample


async def _request(args: Namespace, sample: Sample, url: str, payload: dict[str, Any]) -> dict[str, Any]:
    try:
        return await post(url, payload, headers=request_headers(args, sample), **retry_limits(args))
    except HttpError as error:
        error.add_note(f"while generating {sample.name()}, prompt and answer so far {len(sample.tokens)} tokens")
        raise


async def generate_and_rm(
    args: Namespace, sample: Sample | list[Sample], sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """Generate (unless the sample is finished already), run the sample hooks, and score.

    A custom generate function may return several samples for one: then so does this. Aborted samples are not scored.

    Raises:
        ValueError: the reward is no finite number, or the generate function left the status pending.
    """
    state = GenerateState(args)
    finished = isinstance(sample, Sample) and sample.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)
    if isinstance(sample, Sample) and not finished:
        if not state.aborted:
            async with state.semaphore:  # the wait may have been long: look again
                if not state.aborted:
                    sample = await _generate_one(args, sample, sampling_params, evaluation)
                    sample = await apply_rollout_sample_hooks(args, sample, evaluation=evaluation)
        if state.aborted and isinstance(sample, Sample) and sample.status is Sample.Status.PENDING:
            sample.status = Sample.Status.ABORTED
    if args.group_rm or is_unfinished(sample):
        return sample
    await _score(args, sample, evaluation)
    return sample


async def _generate_one(args: Namespace, sample: Sample, sampling_params: dict[str, Any], evaluation: bool) -> Any:
    mask_off_policy_part(args, sample)
    path = sample.generate_function_path or args.custom_generate_function_path
    if path is None:
        return await generate(args, sample, sampling_params)
    function = load_function(path)
    extra = {"evaluation": evaluation} if "evaluation" in (keyword_names(function) or ()) else {}
    with hook_errors(path, sample):
        result = await function(args, sample, sampling_params, **extra)
    for item in result if isinstance(result, list) else [result]:
        if not isinstance(item, Sample):
            raise TypeError(f"{path} returned {type(item).__name__} for {sample.name()}; expected Sample(s)")
        if item.status is Sample.Status.PENDING:
            raise ValueError(f"{item.name()}: {generate_hook(args, sample)} left the status pending")
    return result


async def _score(args: Namespace, sample: Sample | list[Sample], evaluation: bool) -> None:
    key = args.eval_reward_key if evaluation else args.reward_key
    if isinstance(sample, Sample):
        if sample.reward is None:
            with trace_span(sample, "reward_model"), hook_errors(custom_reward(args, sample), sample):
                reward = await async_rm(args, sample, evaluation=evaluation)
            sample.reward = check_reward(args, sample, reward, key)
        return
    unscored = [item for item in sample if item.reward is None]
    if unscored:
        with trace_span(unscored, "group_reward_model"), hook_errors(args.custom_rm_path, unscored):
            rewards = await batched_async_rm(args, unscored, evaluation=evaluation)
        for item, reward in zip(unscored, rewards, strict=True):
            item.reward = check_reward(args, item, reward, key)


async def generate_and_rm_group(
    args: Namespace, group: list[Sample], sampling_params: dict[str, Any], evaluation: bool = False
) -> SampleGroup:
    """All answers to one prompt; scored together with --group-rm."""
    state = GenerateState(args)
    if state.aborted:
        return group
    for sample in group:
        sample.session_id = sample.session_id or uuid.uuid4().hex
    results = await asyncio.gather(
        *(generate_and_rm(args, s, sampling_params_for(args, s, sampling_params), evaluation) for s in group)
    )
    if args.group_rm and not any(is_unfinished(item) for item in results):
        await _score(args, _flat(results), evaluation)
    return list(results)


def sampling_params_for(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> dict[str, Any]:
    """A copy for one sample, with its own seed under --sglang-enable-deterministic-inference."""
    if not getattr(args, "sglang_enable_deterministic_inference", False):
        return dict(sampling_params)
    return {**sampling_params, "sampling_seed": sampling_seed(args.rollout_seed, sample.index or 0)}


def _flat(items: list[Any]) -> list[Sample]:
    return [leaf for item in items for leaf in (item if isinstance(item, list) else [item])]


async def abort(args: Namespace, rollout_id: int) -> list[list[Sample]]:
    """Stop what is still in generation; ends within a bounded time.

    Returns:
        With --partial-rollout the groups to give back to the data source, else nothing.
    """
    state = GenerateState(args)
    state.aborted = True
    tasks, state.pendings = state.pendings, set()
    if not tasks:
        return []
    cancelled = await drain(args, tasks)
    if not args.partial_rollout:
        for task in tasks - cancelled:
            _ = task.cancelled() or task.exception()  # looked at, so that asyncio doesn't complain
        return []
    groups = []
    for task in tasks:
        lost = task in cancelled or task.cancelled() or task.exception() is not None
        group = state.task_groups[task] if lost else task.result()
        if not can_continue(group):
            continue
        if lost:
            for sample in group:
                reset_sample(sample)
        mark_for_continuation(group, rollout_id)
        groups.append(group)
    return groups


async def generate_rollout_async(
    args: Namespace, rollout_id: int, data_source: Any
) -> tuple[RolloutFnTrainOutput, list[list[Sample]]]:
    """Generate until rollout_batch_size groups have passed the dynamic filter, then stop the rest.

    Args:
        data_source: a data source, or the function that gets groups from it.

    Returns:
        The groups in order of their index with metrics, and the groups to give back to the data source.
    """
    get_samples: Callable[[int], list[list[Sample]]] = getattr(data_source, "get_samples", data_source)
    set_current_rollout_id(rollout_id)
    state = GenerateState(args)
    state.reset()
    collector = GroupCollector(args)
    try:
        while not collector.full:
            while state.remaining_batch_size < collector.target:
                state.submit_generate_tasks(get_samples(args.over_sampling_batch_size))
            done, state.pendings = await asyncio.wait(state.pendings, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=lambda task: first_index(state.task_groups[task])):
                _collect(args, state, collector, task.result())
        returned = await abort(args, rollout_id)
    finally:
        collector.close()
        for task in state.pendings:
            task.cancel()
        in_flight = state.remaining_batch_size
        state.reset()
    if args.partial_rollout:
        returned += [group for group in collector.surplus if can_continue(group)]
    unused = in_flight - len(collector.groups) - len(returned)
    return finish_batch(args, collector, data_source, unused), returned


def finish_batch(
    args: Namespace, collector: GroupCollector, data_source: Any, unused: int = 0
) -> RolloutFnTrainOutput:
    """The collected groups in order of their index, after the hooks of a rollout's end, with their metrics."""
    data = sorted(collector.groups, key=first_index)
    if args.rollout_sample_filter_path:
        with hook_errors(args.rollout_sample_filter_path):
            load_function(args.rollout_sample_filter_path)(args, data)
    if args.rollout_all_samples_process_path:
        with hook_errors(args.rollout_all_samples_process_path):
            load_function(args.rollout_all_samples_process_path)(args, collector.all_groups, data_source)
    return RolloutFnTrainOutput(samples=data, metrics=collector.metrics(unused=unused))


def _collect(args: Namespace, state: GenerateState, collector: GroupCollector, group: SampleGroup) -> None:
    """Take a finished group into the batch; one that an engine aborted is tried again, or given up for another."""
    if not any(is_unfinished(item) for item in group):
        if collector.add(group, state.remaining_batch_size):
            return
    elif can_continue(group):
        collector.count("rollout/aborted_groups_retried")
        prepare_retry(group, keep_tokens=args.partial_rollout)
        state.submit_generate_tasks([group])
    else:
        collector.count("rollout/aborted_groups_dropped")
    state.remaining_batch_size -= 1


def first_index(group: Any) -> int:
    """Index of a group's first sample."""
    while isinstance(group, list):
        group = group[0]
    return group.index if group.index is not None else 0


async def eval_rollout(args: Namespace, rollout_id: int) -> tuple[RolloutFnEvalOutput, list[Any]]:
    """Evaluate on all data sets of --eval-config or --eval-prompt-data at once."""
    if args.group_rm:
        raise ValueError("the default evaluation scores one by one; with --group-rm set --eval-function-path")
    set_current_rollout_id(rollout_id)
    datasets = resolve_eval_datasets(args)
    results = await asyncio.gather(*(eval_rollout_single_dataset(args, rollout_id, config) for config in datasets))
    data: dict[str, dict[str, Any]] = {}
    for result in results:
        data.update(result)
    return RolloutFnEvalOutput(data=data), []


def generate_rollout(
    args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """The rollout function: one batch of groups, or one evaluation (see the two coroutines)."""
    if evaluation:
        return run(eval_rollout(args, rollout_id))[0]
    if hasattr(data_source, "rollout_id"):
        data_source.rollout_id = rollout_id
    output, returned = run(generate_rollout_async(args, rollout_id, data_source))
    if returned:
        data_source.add_samples(returned)
    return output
