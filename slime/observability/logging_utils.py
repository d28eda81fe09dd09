"""Logs and metrics of a run, callable in any of its processes.

The driver calls `configure_logger`, then wraps the run in `tracking(args)`; workers call `configure_logger` with their
role and `log`. All metrics go to the run's one `MetricsHub`.
"""

from __future__ import annotations

import atexit
import logging
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral, Real
from typing import Any

from slime.observability import hub_client
from slime.observability.console_renderer import ConsoleRenderer
from slime.observability.log_setup import configure_logger, terminal
from slime.observability.tracking_config import run_id_of

__all__ = ["configure_logger", "finish_tracking", "init_tracking", "log", "tracking"]

logger = logging.getLogger(__name__)

_renderers: dict[str, ConsoleRenderer] = {}
"""Run id → the terminal display that `init_tracking` started in this process, for `finish_tracking(args)` to end."""


def init_tracking(args: Namespace, primary: bool = True) -> None:
    """Start the run's metrics hub (`primary`, in the driver), or check that this process can reach it.

    Sets `args.wandb_run_id` when W&B is used.

    Raises:
        RuntimeError: not primary, and the run has no hub.
        ValueError: a tracker's settings are incomplete (see `tracking_config`).
    """
    if not primary:
        hub_client.connect(args)
        return
    run_id = run_id_of(args)
    if run_id in _renderers:
        raise RuntimeError(f"init_tracking was called twice for run {run_id}")
    client = hub_client.start_hub(args)
    for name, location in client.locations().items():
        logger.info("metrics (%s): %s", name, location)
    if getattr(args, "use_wandb", False):
        args.wandb_run_id = client.wandb_run_id()
    trains = not getattr(args, "debug_rollout_only", False)
    num_rollout = getattr(args, "num_rollout", None)
    _renderers[run_id] = ConsoleRenderer(client, terminal(), trains=trains, num_rollout=num_rollout)
    atexit.register(finish_tracking, args)


def finish_tracking(args: Namespace) -> None:
    """Flush and close the trackers, show what is left, end the hub. In the driver, once all workers are done.

    Every `log` has returned by then, and it returns only when the hub has the metrics: none is lost. In a process that
    did not start the hub, and when repeated, it does nothing.
    """
    renderer = _renderers.pop(run_id_of(args), None)
    client = hub_client.connected(args)
    if client is None or (renderer is None and not isinstance(client, hub_client.LocalHub)):
        return
    atexit.unregister(finish_tracking)
    try:
        client.finish()
        if renderer is not None:
            renderer.close()
    except BaseException:
        if renderer is not None:
            renderer.abandon()
        raise
    finally:
        hub_client.forget(args)
        client.release()


@contextmanager
def tracking(args: Namespace) -> Iterator[None]:
    """`init_tracking` now, `finish_tracking` at the end, however it ends."""
    init_tracking(args)
    try:
        yield
    finally:
        finish_tracking(args)


def log(args: Namespace, metrics: Mapping[str, Any], step_key: str) -> None:
    """Send `metrics` to the run's trackers and return when they are there.

    Args:
        metrics: metric name → number (or a tensor/array of one element). Holds `step_key` itself.
        step_key: the axis, "train/step", "rollout/step" or "eval/step".

    Raises:
        ValueError: `step_key` is missing, or a metric is not one number; the message names it.
        RuntimeError: the run has no hub, or its trackers were closed already.
    """
    if step_key not in metrics:
        raise ValueError(f"metrics without their step {step_key!r}: {sorted(metrics)}")
    numbers = {name: _number(name, value) for name, value in metrics.items()}
    hub_client.connect(args).log(numbers, step_key, int(numbers[step_key]))


def _number(name: str, value: Any) -> float | int:
    if hasattr(value, "item") and getattr(value, "size", None) is not None:
        try:
            value = value.item()
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"metric {name!r} is not one number: {error}") from None
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise ValueError(f"metric {name!r} is not a number but {value!r}")
