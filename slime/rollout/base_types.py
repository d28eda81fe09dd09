"""What rollout functions return."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, overload

from slime.rollout.hook_errors import hook_errors
from slime.utils.types import Sample

Function = TypeVar("Function", bound=Callable[..., Any])

SampleGroup = list[Any]
"""The answers to one prompt: samples, or lists of samples where one rollout fans out into several."""


@dataclass
class RolloutFnTrainOutput:
    """`samples`: groups (prompt × answer, one level deeper for fan-out) or a flat list; metrics under their names."""

    samples: list[SampleGroup] | list[Sample]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """`data[dataset] = {"rewards": [...], "truncated": [...], "samples": [...]}`; metrics under their names."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


@overload
def call_rollout_fn(
    fn: Callable[..., Any], *args: Any, evaluation: Literal[False], **kwargs: Any
) -> RolloutFnTrainOutput: ...
@overload
def call_rollout_fn(
    fn: Callable[..., Any], *args: Any, evaluation: Literal[True], **kwargs: Any
) -> RolloutFnEvalOutput: ...
def call_rollout_fn(fn: Callable[..., Any], *args: Any, evaluation: bool, **kwargs: Any) -> Any:
    """Call a rollout function; a bare list (training) or dict (evaluation) is wrapped.

    Raises:
        TypeError: it returned something else.
    """
    name = f"{fn.__module__}.{getattr(fn, '__qualname__', fn)}"
    with hook_errors(None if name.startswith("slime.") else name):
        output = fn(*args, **kwargs, evaluation=evaluation)
    expected: type[Any] = RolloutFnEvalOutput if evaluation else RolloutFnTrainOutput
    bare = dict if evaluation else list
    if isinstance(output, bare):
        output = expected(output)
    if not isinstance(output, expected):
        raise TypeError(
            f"{name} returned {type(output).__name__} with evaluation={evaluation};"
            f" it must return {expected.__name__} or {bare.__name__}"
        )
    return output


def keeps_generating(fn: Function) -> Function:
    """Mark a rollout function that generates between its calls too: weights are sent while it does.

    Of any other function a whole rollout is generated with the same weights.
    """
    vars(fn)["keeps_generating"] = True
    return fn
