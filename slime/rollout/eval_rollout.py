"""Evaluation of the served model on one data set."""

from __future__ import annotations

import asyncio
import copy
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from slime.observability.progress import Progress
from slime.rollout.generate_state import base_sampling_params
from slime.rollout.partial_rollout import is_unfinished
from slime.rollout.rm_hub import warn_without_marker
from slime.utils.data import Dataset
from slime.utils.eval_config import EvalDatasetConfig
from slime.utils.types import Sample

EVAL_PROMPT_DATASET: dict[Any, Dataset] = {}  # prompts are read once per process


async def eval_rollout_single_dataset(
    args: Namespace, rollout_id: int, dataset_cfg: EvalDatasetConfig
) -> dict[str, dict[str, Any]]:
    """{name: {"rewards", "truncated", "samples"}}, each prompt answered n_samples_per_eval_prompt times, in order.

    Raises:
        ValueError: the data set has no rows, or a reward is no finite number; names data set and sample.
        RuntimeError: an answer was aborted, or could not be generated or scored; names data set and sample.
    """
    from slime.rollout import sglang_rollout  # plug-ins replace its functions

    eval_args = copy.copy(args)
    eval_args.rollout_max_context_len = args.eval_max_context_len
    params = eval_sampling_params(args, dataset_cfg)
    samples = _make_samples(dataset_cfg, _load_dataset(args, dataset_cfg))
    if not samples:
        longer = f", or none of at most {args.eval_max_prompt_len} tokens (--eval-max-prompt-len)"
        hint = longer if args.eval_max_prompt_len is not None else ""
        raise ValueError(f"evaluation on {dataset_cfg.name}: {dataset_cfg.path} has no rows{hint}")
    progress = Progress(args, f"eval {dataset_cfg.name}", len(samples))

    async def answer(sample: Sample) -> Any:
        own_params = sglang_rollout.sampling_params_for(args, sample, params)
        with _named(dataset_cfg, sample):
            result = await sglang_rollout.generate_and_rm(eval_args, sample, own_params, evaluation=True)
        progress.update(1)
        return result

    tasks = [asyncio.create_task(answer(sample)) for sample in samples]
    try:
        results = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        progress.close()
    return {dataset_cfg.name: _collect_results(args, dataset_cfg, results)}


@contextmanager
def _named(config: EvalDatasetConfig, sample: Sample) -> Iterator[None]:
    """Errors say in which data set and for which sample they came up."""
    where = f"evaluation on {config.name}"
    try:
        yield
    except ValueError as error:
        text = str(error)
        raise ValueError(f"{where}: {text if sample.name() in text else f'{sample.name()}: {text}'}") from error
    except Exception as error:
        hook = sample.custom_rm_path or sample.generate_function_path
        hint = f" (its own functions: {hook})" if hook else ""
        raise RuntimeError(f"{where}: {sample.name()}: {type(error).__name__}: {error}{hint}") from error


def _load_dataset(args: Namespace, config: EvalDatasetConfig) -> Dataset:
    from slime.rollout import sglang_rollout

    key = (*config.cache_key, args.hf_checkpoint, args.eval_max_prompt_len)
    if key not in EVAL_PROMPT_DATASET:
        state = sglang_rollout.GenerateState(args)
        EVAL_PROMPT_DATASET[key] = Dataset(
            config.path,
            state.tokenizer,
            state.processor,
            args.eval_max_prompt_len,
            prompt_key=config.input_key,
            label_key=config.label_key,
            tool_key=config.tool_key,
            metadata_key=config.metadata_key,
            multimodal_keys=config.multimodal_keys,
            apply_chat_template=config.apply_chat_template,
            apply_chat_template_kwargs=config.apply_chat_template_kwargs,
        )
    return EVAL_PROMPT_DATASET[key]


def _make_samples(config: EvalDatasetConfig, dataset: Dataset) -> list[Sample]:
    samples: list[Sample] = []
    for group_index, prompt in enumerate(dataset.samples):
        for _ in range(config.n_samples_per_eval_prompt):
            sample = copy.deepcopy(prompt)
            sample.group_index, sample.index = group_index, len(samples)
            sample.metadata = config.inject_metadata(sample.metadata)
            sample.custom_rm_path = config.custom_rm_path or sample.custom_rm_path
            sample.generate_function_path = config.custom_generate_function_path or sample.generate_function_path
            samples.append(sample)
    return samples


def eval_sampling_params(args: Namespace, config: EvalDatasetConfig) -> dict[str, Any]:
    """Sampling parameters of a data set; those that are None are as in training, or left to the engine."""
    own = {
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "max_new_tokens": config.max_response_len,
        "stop": config.stop,
        "stop_token_ids": config.stop_token_ids,
        "skip_special_tokens": config.skip_special_tokens,
        "no_stop_trim": config.no_stop_trim,
        "min_new_tokens": config.min_new_tokens,
        "repetition_penalty": config.repetition_penalty,
    }
    return base_sampling_params(args) | {name: value for name, value in own.items() if value is not None}


def _collect_results(args: Namespace, config: EvalDatasetConfig, results: list[Any]) -> dict[str, Any]:
    samples = [leaf for result in results for leaf in (result if isinstance(result, list) else [result])]
    unfinished = [sample for sample in samples if is_unfinished(sample)]
    if unfinished:
        names = ", ".join(sample.name() for sample in unfinished[:5])
        raise RuntimeError(f"evaluation on {config.name}: {len(unfinished)} answers were aborted: {names}")
    warn_without_marker(args, samples)
    key = args.eval_reward_key or args.reward_key
    rewards = [sample.reward[key] if isinstance(sample.reward, dict) and key else sample.reward for sample in samples]
    truncated = [sample.status is Sample.Status.TRUNCATED for sample in samples]
    return {"rewards": rewards, "truncated": truncated, "samples": samples}
