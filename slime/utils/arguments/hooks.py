"""Functions and classes of the user that flags name, with the signatures they must have.

All that are given are imported and checked before anything is started. The expected signature stands in the error.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from slime.utils.arguments.errors import suggestion
from slime.utils.arguments.rules.context import Context
from slime.utils.misc import load_function


@dataclass(frozen=True)
class Hook:
    """A place where a user's function is called.

    Attributes:
        dest: the flag's attribute.
        signature: as shown in errors and in the documentation.
        called: when and where, for the documentation.
        positional: the arguments that slime passes by position, by name of what they are.
        keywords: the arguments that slime always passes by keyword.
        is_async: the function must be `async def`.
        methods: for a class, the methods that it must have.
    """

    dest: str
    signature: str
    called: str
    positional: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    is_async: bool = False
    methods: tuple[str, ...] = ()


_ROLLOUT = ("args", "rollout_id", "data_source")
_TIS = ("pg_loss", "train_log_probs", "rollout_log_probs", "loss_masks", "total_lengths", "response_lengths")

HOOKS: tuple[Hook, ...] = (
    Hook(
        "rollout_function_path",
        "fn(args, rollout_id, data_source, evaluation=False) -> RolloutFnTrainOutput",
        "once per rollout, in the rollout manager; replaces generation, reward and filters as a whole",
        _ROLLOUT,
        ("evaluation",),
    ),
    Hook(
        "eval_function_path",
        "fn(args, rollout_id, data_source, evaluation=True) -> RolloutFnEvalOutput",
        "once per evaluation, in the rollout manager; unset: the rollout function",
        _ROLLOUT,
        ("evaluation",),
    ),
    Hook(
        "data_source_path",
        "class(args) with get_samples(num_groups), add_samples(groups), save(rollout_id), load(rollout_id=None), "
        "__len__()",
        "built once in the rollout manager; hands out prompts, and is saved and loaded with checkpoints",
        ("args",),
        methods=("get_samples", "add_samples", "save", "load", "__len__"),
    ),
    Hook(
        "buffer_filter_path",
        "fn(args, rollout_id, buffer, num_samples) -> list of groups, taken out of buffer",
        "each time groups are asked for while the buffer has some; takes what it returns out of the buffer",
        ("args", "rollout_id", "buffer", "num_samples"),
    ),
    Hook(
        "custom_generate_function_path",
        "async fn(args, sample, sampling_params[, evaluation]) -> Sample | list[Sample]",
        "per sample, when the engines have room for one more; several samples back: a fan-out",
        ("args", "sample", "sampling_params"),
        is_async=True,
    ),
    Hook(
        "rollout_sample_hook_path",
        "fn(args, sample, *, rollout_id=None, evaluation=False) -> Sample | None, sync or async",
        "on each sample between generation and reward; may be given several times",
        ("args", "sample"),
    ),
    Hook(
        "custom_rm_path",
        "async fn(args, sample, **kwargs) -> number | dict (a list of samples and of rewards with --group-rm)",
        "per sample after generation; with --group-rm, or after a fan-out, with lists of samples and rewards",
        ("args", "sample"),
        is_async=True,
    ),
    Hook(
        "dynamic_sampling_filter_path",
        "fn(args, group, **kwargs) -> DynamicFilterOutput | bool",
        "on each finished group of a training rollout",
        ("args", "group"),
    ),
    Hook(
        "rollout_sample_filter_path",
        "fn(args, data) -> None, sets sample.remove_sample",
        "at the end of a rollout, on the groups that train",
        ("args", "data"),
    ),
    Hook(
        "rollout_all_samples_process_path",
        "fn(args, all_groups, data_source) -> None",
        "at the end of a rollout, on every generated group, the dropped ones too",
        ("args", "all_groups", "data_source"),
    ),
    Hook(
        "custom_reward_post_process_path",
        "fn(args, samples) -> (raw_rewards, rewards)",
        "once per rollout, before train data is made; replaces the normalisation of rewards",
        ("args", "samples"),
    ),
    Hook(
        "custom_convert_samples_to_train_data_path",
        "fn(args, samples) -> dict of train-data columns",
        "once per rollout; replaces the conversion, normalisation of rewards included",
        ("args", "samples"),
    ),
    Hook(
        "custom_rollout_log_function_path",
        "fn(rollout_id, args, samples, rollout_extra_metrics, rollout_time) -> bool",
        "after each rollout; True: the default metrics are not logged",
        ("rollout_id", "args", "samples", "rollout_extra_metrics", "rollout_time"),
    ),
    Hook(
        "custom_eval_rollout_log_function_path",
        "fn(rollout_id, args, data, extra_metrics) -> bool",
        "after each evaluation; True: the default metrics are not logged",
        ("rollout_id", "args", "data", "extra_metrics"),
    ),
    Hook(
        "rollout_data_postprocess_path",
        "fn(args, rollout_id, rollout_data) -> None, edits in place",
        "on every trainer, after log-probs and advantages, before training",
        ("args", "rollout_id", "rollout_data"),
    ),
    Hook(
        "custom_advantage_function_path",
        "fn(args, rollout_data) -> None, sets advantages and returns",
        "on trainers of the last pipeline stage; replaces the estimator",
        ("args", "rollout_data"),
    ),
    Hook(
        "custom_loss_function_path",
        "fn(args, batch, logits, sum_of_sample_mean) -> (loss, dict of metrics)",
        "per micro-batch, on the last pipeline stage, with --loss-type custom_loss",
        ("args", "batch", "logits", "sum_of_sample_mean"),
    ),
    Hook(
        "custom_tis_function_path",
        f"fn(args, *, {', '.join(_TIS)}, **kwargs) -> (pg_loss, modified_masks, metrics)",
        "per micro-batch in the policy loss, with --use-tis, --use-rs or --get-mismatch-metrics",
        ("args",),
        _TIS,
    ),
    Hook(
        "custom_pg_loss_reducer_function_path",
        "fn(total_lengths, response_lengths, loss_masks, calculate_per_token_loss) -> Callable[[tensor], tensor]",
        "per micro-batch in the policy loss; its result reduces the policy term alone",
        ("total_lengths", "response_lengths", "loss_masks", "calculate_per_token_loss"),
    ),
    Hook(
        "custom_megatron_init_path",
        "fn(args) -> None",
        "on every trainer, when process groups exist and before the model is built",
        ("args",),
    ),
    Hook(
        "custom_megatron_before_log_prob_hook_path",
        "fn(args, model_chunks, store_prefix) -> None",
        "on every trainer, before each forward-only pass",
        ("args", "model_chunks", "store_prefix"),
    ),
    Hook(
        "custom_megatron_before_train_step_hook_path",
        "fn(args, rollout_id, step_id, model, optimizer, opt_param_scheduler) -> None",
        "on every trainer, before each optimiser step",
        ("args", "rollout_id", "step_id", "model", "optimizer", "opt_param_scheduler"),
    ),
    Hook(
        "custom_model_provider_path",
        "fn(pre_process, post_process[, vp_stage]) -> GPTModel",
        "on every trainer, once per model chunk",
        keywords=("pre_process", "post_process"),
    ),
    Hook(
        "spec",
        "fn(args, config, vp_stage) -> layer spec | provider, or provider(pre_process, post_process[, vp_stage])",
        "on every trainer, once per model chunk; given as module and function: --spec package.module fn",
        ("args", "config", "vp_stage"),
    ),
    Hook(
        "slime_router_middleware_paths",
        "async fn(request, handler) -> response (aiohttp.web)",
        "on every request to slime's own router (--use-slime-router), in its process; `handler(request)` goes on",
        ("request", "handler"),
        is_async=True,
    ),
    Hook(
        "custom_update_weight_post_write_path",
        "fn(args, version_dir, rollout_engines) -> None",
        "on every trainer, after the files of a weight sync by disk are written",
        ("args", "version_dir", "rollout_engines"),
    ),
)


def check_hooks(context: Context) -> None:
    """Import every hook that is given and compare its signature with the expected one."""
    for hook in HOOKS:
        default = context.table.by_dest[hook.dest].default
        for path in _paths(hook, getattr(context.args, hook.dest)):
            if path != default and not (
                hook.dest == "eval_function_path" and path == context.args.rollout_function_path
            ):
                context.problems.found += hook_problems(hook, context.name(hook.dest), path)
    _check_hooks_of_datasets(context)


def _check_hooks_of_datasets(context: Context) -> None:
    """Evaluation data sets may bring a reward and a generate function of their own."""
    by_dest = {hook.dest: hook for hook in HOOKS}
    for config in context.args.eval_datasets:
        for dest in ("custom_rm_path", "custom_generate_function_path"):
            path = getattr(config, dest)
            if path is not None:
                name = f"evaluation data set {config.name!r}: {dest}"
                context.problems.found += hook_problems(by_dest[dest], name, path)


def hook_problems(hook: Hook, name: str, path: str) -> list[str]:
    """What is wrong with the object that `path` names; `name` is how the message calls the setting."""
    target, problem = _load(path)
    if problem is None:
        problem = _signature_problem(hook, target)
    return [] if problem is None else [f"{name} {path}: {problem}; expected {hook.signature}"]


def assert_hook(flag: str, path: str) -> None:
    """For tests of your own hooks: `assert_hook("--custom-rm-path", "my_package.rewards.score")`.

    Raises:
        AssertionError: `path` can't be imported or has another signature than the flag's function; or no such flag.
    """
    by_flag = {f"--{hook.dest.replace('_', '-')}": hook for hook in HOOKS}
    assert flag in by_flag, f"{flag} names no function{suggestion(flag, by_flag)}"
    problems = hook_problems(by_flag[flag], flag, path)
    assert not problems, problems[0]


def _paths(hook: Hook, value: Any) -> Iterator[str]:
    if hook.dest == "spec":  # module and function as two words
        yield from [value if isinstance(value, str) else ".".join(value)] if value else []
    elif isinstance(value, str):
        yield value
    elif value:
        yield from value


def _load(path: str) -> tuple[Any, str | None]:
    try:
        return load_function(path), None
    except ValueError as error:
        return None, str(error)
    except ImportError as error:
        return None, f"can't be imported ({error})"
    except Exception as error:  # a user's module may raise anything while it is imported
        return None, f"can't be imported ({type(error).__name__}: {error})"


def _signature_problem(hook: Hook, target: Any) -> str | None:
    if not callable(target):
        return f"is a {type(target).__name__}, which can't be called"
    if hook.methods:
        if not inspect.isclass(target):
            return "is not a class"
        missing = [method for method in hook.methods if not callable(getattr(target, method, None))]
        if missing:
            return f"has no {', '.join(missing)}"
    try:
        if hook.dest == "spec" and "pre_process" in inspect.signature(target).parameters:
            return None  # a provider: it is called by keyword
        inspect.signature(target).bind(*hook.positional, **dict.fromkeys(hook.keywords))
    except TypeError as error:
        return f"does not fit the call ({error})"
    except ValueError:
        return None  # a builtin without a signature
    if hook.is_async and not _is_async(target):
        return "is not an async function"
    return None


def _is_async(target: Any) -> bool:
    function = inspect.unwrap(target) if inspect.isfunction(target) else target
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
