"""How the trainers' ranks speak to the engines during an update: one acts, all learn how it went."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from slime.backends.megatron_utils.update_weight.errors import WeightUpdateError
from slime.ray.utils import get_all
from slime.utils.distributed_utils import get_gloo_group

GRACE_SECONDS = 60.0  # that trainers wait longer than an engine for its server, so that the engine's error comes first


def together(action: Callable[[], Any]) -> None:
    """Run this rank's `action`; no rank goes on before all are done.

    Raises:
        WeightUpdateError: on every rank, when the action of one failed; with the error of each that did.
    """
    problem, cause = None, None
    try:
        action()
    except Exception as error:
        cause = getattr(error, "cause", None) or error  # Ray wraps what an actor raised
        problem = f"trainer rank {dist.get_rank()}: {type(cause).__name__}: {cause}"
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem, group=get_gloo_group())
    failed = [text for text in problems if text is not None]
    if failed:
        raise WeightUpdateError("the engines' weights were not updated: " + "; ".join(failed)) from cause


def engine_seconds(args: Namespace) -> float:
    """How long a trainer waits for an engine's answer."""
    return args.update_weight_timeout + GRACE_SECONDS


def call_engines(engines: Sequence[Any], *methods: str, seconds: float) -> None:
    """Let rank 0 call methods of all engines, one after the other; every rank waits until they are done."""

    def call() -> None:
        for method in methods:
            call_all(engines, method, seconds=seconds)

    on_first_rank(call)


def on_first_rank(action: Callable[[], Any]) -> None:
    """`together` with an action for rank 0 alone."""
    together(action if dist.get_rank() == 0 else lambda: None)


def call_all(engines: Sequence[Any], method: str, *method_args: Any, seconds: float) -> None:
    """Call a method of all engines at once and wait; this rank alone."""
    refs = [getattr(engine, method).remote(*method_args) for engine in engines]
    get_all(refs, timeout=seconds, what=f"{method} of the engines")
