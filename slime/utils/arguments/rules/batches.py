"""Prompts, samples, optimiser steps and micro-batches must divide."""

from __future__ import annotations

from collections.abc import Mapping

from slime.utils.arguments.rules.context import Context
from slime.utils.prompt_data import parse_prompt_data
from slime.utils.read_rows import check_file, wanted_columns

FULLY_ASYNC = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
CHECKED_DATA_BYTES = 64 * 2**20  # a larger file would take seconds to read; whoever loads it says what is wrong


def resolve_batches(context: Context) -> None:
    """Batch sizes and lengths that follow from others."""
    args = context.args
    if isinstance(args.prompt_data, list) and len(args.prompt_data) == 1:
        (args.prompt_data,) = args.prompt_data  # one file is a string, as data sources of users expect
    context.fill_none("over_sampling_batch_size", args.rollout_batch_size)
    if args.rollout_batch_size is not None:
        _resolve_global_batch_size(context, args.rollout_batch_size * args.n_samples_per_prompt)
    if args.balance_by_flops:
        context.force("balance_data", True, context.name("balance_by_flops"))
    if args.rollout_max_context_len is not None:
        context.fill_none("rollout_max_prompt_len", args.rollout_max_context_len - 1)
    context.fill_none("eval_max_context_len", args.rollout_max_context_len)
    if args.num_rollout is not None and args.num_epoch is not None:
        context.notice("--num-rollout %d and --num-epoch %d: --num-rollout counts", args.num_rollout, args.num_epoch)


def _resolve_global_batch_size(context: Context, samples: int) -> None:
    args = context.args
    steps = args.num_steps_per_rollout
    if steps is None:
        context.fill_none("global_batch_size", samples)
        return
    if samples % steps:
        context.problems.add(
            f"{samples} samples per rollout (--rollout-batch-size {args.rollout_batch_size} x "
            f"--n-samples-per-prompt {args.n_samples_per_prompt}) don't divide into "
            f"{context.shown('num_steps_per_rollout')}"
        )
        return
    context.force("global_batch_size", samples // steps, context.shown("num_steps_per_rollout"))


def check_batches(context: Context) -> None:
    """Whole steps of whole groups, and enough prompts per request."""
    args = context.args
    if args.rollout_batch_size is None:
        context.problems.add("--rollout-batch-size is needed")
        return
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    if not args.debug_rollout_only and args.num_rollout != 0 and args.num_steps_per_rollout is None:
        context.require(
            samples % args.global_batch_size == 0,
            f"{context.shown('global_batch_size')} does not divide the {samples} samples of a rollout "
            f"({context.shown('rollout_batch_size')} x {context.shown('n_samples_per_prompt')})",
        )
    context.require(
        args.over_sampling_batch_size >= args.rollout_batch_size,
        f"{context.shown('over_sampling_batch_size')} is less than {context.shown('rollout_batch_size')}",
    )
    default_rollout = context.table.by_dest["rollout_function_path"].default
    context.require(
        args.max_staleness is None or args.rollout_function_path != default_rollout,
        f"{context.shown('max_staleness')} is for --rollout-function-path {FULLY_ASYNC}: the default rollout function"
        " has nothing that could be stale",
    )
    context.needs("use_dynamic_batch_size", "max_tokens_per_gpu")
    context.needs("balance_by_flops", "use_dynamic_batch_size")
    if args.num_rollout is None:
        context.require(args.num_epoch is not None, "--num-rollout or --num-epoch is needed")
        context.require(
            args.num_epoch is None or args.rollout_global_dataset,
            f"{context.name('num_epoch')} needs the global data set (without --disable-rollout-global-dataset)",
        )
    else:
        context.require(args.num_rollout >= 0, f"{context.shown('num_rollout')} is negative")


def check_micro_batches(context: Context) -> None:
    """A step must spread over the data-parallel ranks without empty or partial micro-batches."""
    args = context.args
    if args.num_rollout == 0 or args.global_batch_size is None:
        return
    ranks = args.data_parallel_size
    if args.use_dynamic_batch_size:
        context.require(
            args.global_batch_size >= ranks,
            f"{context.shown('global_batch_size')} is less than the {ranks} data-parallel ranks",
        )
        return
    context.require(
        args.global_batch_size % (args.micro_batch_size * ranks) == 0,
        f"{context.shown('global_batch_size')} is not a multiple of {context.shown('micro_batch_size')} x "
        f"{ranks} data-parallel ranks",
    )


def check_lengths(context: Context) -> None:
    """Token limits of prompts, responses and both."""
    args = context.args
    limit = args.rollout_max_context_len
    if limit is not None and args.rollout_max_prompt_len is not None:
        context.require(
            args.rollout_max_prompt_len < limit,
            f"{context.shown('rollout_max_prompt_len')} leaves no room for a response within "
            f"{context.shown('rollout_max_context_len')}",
        )
    if not args.debug_train_only:
        context.require(
            args.rollout_max_response_len, "--rollout-max-response-len is needed: when does a response end?"
        )


def check_prompt_data(context: Context) -> None:
    """The prompts' file exists and is of a kind that can be read."""
    args = context.args
    own_source = args.data_source_path != context.table.by_dest["data_source_path"].default
    if args.prompt_data is None:
        needs = args.rollout_global_dataset and not own_source and args.load_debug_rollout_data is None
        context.require(
            not needs or args.num_rollout == 0,
            "--prompt-data is needed (or --disable-rollout-global-dataset, or a --data-source-path of your own)",
        )
        return
    wanted = wanted_columns(args.input_key, args.label_key, args.tool_key, args.multimodal_keys)
    if own_source:
        return  # what --prompt-data means is its business
    try:
        files = parse_prompt_data(args.prompt_data)
    except ValueError as error:
        context.problems.add(f"{context.name('prompt_data')}: {error}")
        return
    for file in files:
        check_data_file(context, context.name("prompt_data"), file.path, wanted)


def check_data_file(context: Context, name: str, path: str, wanted: Mapping[str, str]) -> None:
    """A problem if the file of `path` or `path@[a:b]` is missing, has a broken line, or lacks a wanted column."""
    try:
        check_file(path, wanted, CHECKED_DATA_BYTES)
    except (FileNotFoundError, ValueError) as error:
        context.problems.add(f"{name}: {error}")
