"""Per-sample hooks (`--rollout-sample-hook-path`) that run after generation and before the reward."""

from __future__ import annotations

import functools
import inspect
from contextvars import ContextVar
from typing import Any

from slime.rollout.hook_errors import hook_errors
from slime.utils.misc import load_function
from slime.utils.types import Sample

_current_rollout_id: ContextVar[int | None] = ContextVar("current_rollout_id", default=None)


def set_current_rollout_id(rollout_id: int | None) -> None:
    """Name the rollout that hooks see as `rollout_id`, for this context and the tasks started from it."""
    _current_rollout_id.set(rollout_id)


async def apply_rollout_sample_hooks(args: Any, value: Any, **kwargs: Any) -> Any:
    """Run the hooks in order on every sample in `value` (a sample or nested lists); the same shape comes back.

    A hook returns the sample to go on with, or None for the one it was given. It may be async, and is passed only
    the keyword arguments that it names.

    Raises:
        TypeError: a hook returned something else; the message names hook and sample.
    """
    paths = getattr(args, "rollout_sample_hook_path", None)
    if not paths:
        return value
    if isinstance(value, list):
        return [await apply_rollout_sample_hooks(args, item, **kwargs) for item in value]
    for path in paths:
        value = await _apply_hook(path, args, value, {"rollout_id": _current_rollout_id.get(), **kwargs})
    return value


async def _apply_hook(path: str, args: Any, sample: Sample, kwargs: dict[str, Any]) -> Sample:
    hook = load_function(path)
    with hook_errors(path, sample):
        result = hook(args, sample, **accepted_kwargs(hook, kwargs))
        if inspect.isawaitable(result):
            result = await result
    if result is None:
        return sample
    if not isinstance(result, Sample):
        raise TypeError(f"hook {path} returned {type(result).__name__} for {sample.name()}; expected Sample or None")
    return result


def accepted_kwargs(fn: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The entries of `kwargs` that `fn` takes by name."""
    names = keyword_names(fn)
    return kwargs if names is None else {name: value for name, value in kwargs.items() if name in names}


@functools.cache
def keyword_names(fn: Any) -> frozenset[str] | None:
    """What `fn` takes by name; None: anything."""
    parameters = inspect.signature(fn).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(p.name for p in parameters if p.kind is not inspect.Parameter.POSITIONAL_ONLY)
