"""Small helpers that every layer uses."""

from __future__ import annotations

import functools
import importlib
import socket
from collections.abc import Callable, Iterable, Iterator
from typing import Any


@functools.cache
def load_function(path: str) -> Any:
    """Return the object that `path` ("package.module.attribute") names.

    Raises:
        ValueError: the path has no dot.
        ImportError: the module can't be imported, or has no such attribute; the message names both parts.
    """
    module_path, _, attribute = path.rpartition(".")
    if not module_path:
        raise ValueError(f"{path!r} is not a path of the form package.module.attribute")
    module = importlib.import_module(module_path)
    if not hasattr(module, attribute):
        raise ImportError(f"module {module_path!r} has no attribute {attribute!r} (from the path {path!r})")
    return getattr(module, attribute)


class SingletonMeta(type):
    """Metaclass of classes with one instance per process; kept for plug-ins that build on it."""

    _instances: dict[type, Any] = {}  # noqa: RUF012

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls not in SingletonMeta._instances:
            SingletonMeta._instances[cls] = super().__call__(*args, **kwargs)
        return SingletonMeta._instances[cls]

    @staticmethod
    def clear_instances(cls: type | None = None) -> None:
        """Forget the instance of `cls`, or of every class."""
        if cls is None:
            SingletonMeta._instances.clear()
        else:
            SingletonMeta._instances.pop(cls, None)


class Box:
    """Holds an object reference so that Ray passes it on instead of resolving it."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    @property
    def inner(self) -> Any:
        return self._inner


def should_run_periodic_action(
    rollout_id: int,
    interval: int | None,
    num_rollout_per_epoch: int | None = None,
    num_rollout: int | None = None,
) -> bool:
    """Whether an action that repeats every `interval` rollouts is due after rollout `rollout_id`.

    It is also due at the end of each epoch and, when `num_rollout` is given, after the last rollout.
    """
    if interval is None:
        return False
    if num_rollout is not None and rollout_id == num_rollout - 1:
        return True
    step = rollout_id + 1
    return step % interval == 0 or (num_rollout_per_epoch is not None and step % num_rollout_per_epoch == 0)


def group_by(iterable: Iterable[Any], key: Callable[[Any], Any] | None = None) -> dict[Any, list[Any]]:
    """Collect items under `key(item)` (or the item), keeping first-seen order."""
    groups: dict[Any, list[Any]] = {}
    for item in iterable:
        groups.setdefault(item if key is None else key(item), []).append(item)
    return groups


def iter_leaves(items: Any) -> Iterator[Any]:
    """What nested lists hold, in order; a thing that is no list is its own leaf."""
    if isinstance(items, list):
        for item in items:
            yield from iter_leaves(item)
    else:
        yield items


def get_free_port(host: str = "") -> int:
    """A TCP port that the system says is free now. To hold one without a race, use `slime.ray.ports`."""
    with socket.socket() as sock:
        sock.bind((host, 0))
        return sock.getsockname()[1]
