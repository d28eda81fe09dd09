"""Process groups that can be destroyed and rebuilt in place, while everybody keeps a reference to them.

A trainer that sleeps must give back the device memory of its communicators, but Megatron's modules hold their groups.
After `monkey_patch_torch_dist` every new group of the default backend is a `ReloadableProcessGroup`, which passes each
call on to an inner group of torch. Sleeping drops the inner groups, waking makes new ones.

It uses torch's private group bookkeeping. Written for torch 2.13; `monkey_patch_torch_dist` checks what it relies on.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

_OWN_METHODS = {"rank", "size", "name", "unbox"}


class ReloadableProcessGroup(dist.ProcessGroup):
    """A group whose rank and size stay and whose communication is done by `inner`, None while it is destroyed.

    Raises:
        RuntimeError: a call while it is destroyed.
    """

    def __init__(self, inner: dist.ProcessGroup, recipe: _Recipe) -> None:
        super().__init__(inner.rank(), inner.size())
        self.inner: dist.ProcessGroup | None = inner
        self.recipe = recipe

    def alive(self) -> dist.ProcessGroup:
        """The inner group."""
        if self.inner is None:
            raise RuntimeError(
                f"process group {self.recipe.description!r} of ranks {self.recipe.ranks} is destroyed while the "
                "trainer sleeps: wake it first"
            )
        return self.inner

    def name(self) -> str:
        return self.recipe.backend


@dataclass(frozen=True)
class _Recipe:
    """How to make the inner group again: its first name and what `_new_process_group_helper` takes."""

    name: str
    ranks: tuple[int, ...]
    backend: str
    options: Any
    timeout: timedelta
    description: str
    store: dist.Store


def _delegate_to_inner() -> None:
    """Give `ReloadableProcessGroup` every method and property of torch's group, answered by the inner one."""

    def method(name: str) -> Callable[..., Any]:
        def call(self: ReloadableProcessGroup, *args: Any, **kwargs: Any) -> Any:
            return getattr(self.alive(), name)(*args, **kwargs)

        return call

    def prop(name: str) -> property:
        def get(self: ReloadableProcessGroup) -> Any:
            return getattr(self.alive(), name)

        def set_(self: ReloadableProcessGroup, value: Any) -> None:
            setattr(self.alive(), name, value)

        return property(get, set_)

    for name, value in vars(dist.ProcessGroup).items():
        if name.startswith("__") or name == "_pybind11_conduit_v1_" or name in _OWN_METHODS:
            continue
        if isinstance(value, property):
            setattr(ReloadableProcessGroup, name, prop(name))
        elif inspect.isroutine(value):
            setattr(ReloadableProcessGroup, name, method(name))


_delegate_to_inner()


@dataclass
class _State:
    """torch's own functions, replaced by the patch, and the reloadable groups in the order of their creation."""

    originals: dict[str, Callable[..., Any]] = field(default_factory=dict)
    groups: list[ReloadableProcessGroup] = field(default_factory=list)
    generation: int = 0
    asleep: bool = False


_state = _State()


def monkey_patch_torch_dist() -> None:
    """Make groups that are created from now on reloadable; a default group that exists already, too. Idempotent.

    Reloadable are groups with the default group's backend; others (gloo beside NCCL) hold no device memory.

    Raises:
        RuntimeError: torch's bookkeeping is not what this module was written for.
    """
    if _state.originals:
        return
    _check_torch()
    for name, replacement in (
        ("init_process_group", _init_process_group),
        ("new_group", _new_group),
        ("destroy_process_group", _destroy_process_group),
        ("batch_isend_irecv", _batch_isend_irecv),
    ):
        original = getattr(c10d, name)
        _state.originals[name] = original
        wrapped = functools.wraps(original)(replacement)
        setattr(c10d, name, wrapped)
        setattr(dist, name, wrapped)
    if dist.is_initialized():
        _register_default_group()


def new_permanent_group(**kwargs: Any) -> dist.ProcessGroup:
    """`torch.distributed.new_group` whose result is never destroyed for sleep."""
    return _state.originals.get("new_group", dist.new_group)(**kwargs)


def destroy_process_groups() -> None:
    """Drop the communicators of all reloadable groups; the default group goes on as gloo. Every rank must call it.

    Does nothing when they are destroyed already.
    """
    if _state.asleep:
        return
    _meet("destroy")  # a rank that is still in a collective would lose its peers
    for group in reversed(_state.groups):
        if group is _default():
            _attach(group, "gloo")
        else:
            _drop_inner(group)
    _state.asleep = True


def reload_process_groups() -> None:
    """Make new communicators for all reloadable groups. Every rank must call it. Does nothing when they are alive."""
    if not _state.asleep:
        return
    _meet("reload")
    for group in _state.groups:
        _attach(group, group.recipe.backend)
    _state.asleep = False


def _init_process_group(*args: Any, **kwargs: Any) -> None:
    _state.originals["init_process_group"](*args, **kwargs)
    _register_default_group()


def _new_group(*args: Any, **kwargs: Any) -> Any:
    inner = _state.originals["new_group"](*args, **kwargs)
    if not isinstance(inner, dist.ProcessGroup):  # this rank is not a member
        return inner
    default = _default()
    backend = dist.get_backend(inner)
    if default is None or backend != default.recipe.backend:
        return inner
    given = inspect.signature(_state.originals["new_group"]).bind(*args, **kwargs).arguments
    return _wrap(inner, given.get("pg_options"), given.get("timeout"))


def _destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
    """Destroying the default group destroys all; a reloadable one is forgotten."""
    original = _state.originals["destroy_process_group"]
    if group is None or group is dist.group.WORLD:
        default = _default()
        if default is not None:
            c10d._update_default_pg(default.inner)
        for each in _state.groups:
            _leave(each)
            each.inner = None
        _state.groups.clear()
        _state.asleep = False
        original()
    elif isinstance(group, ReloadableProcessGroup):
        _state.groups.remove(group)
        _drop_inner(group)
        _leave(group)
    else:
        original(group)


def _batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
    """torch batches only what it knows to be its own group, so give it the inner one."""
    ops = []
    for op in p2p_op_list:
        if isinstance(op.group, ReloadableProcessGroup):
            op = dist.P2POp(op.op, op.tensor, group=op.group.alive(), tag=op.tag, group_peer=op.group_peer)
        ops.append(op)
    return _state.originals["batch_isend_irecv"](ops)


def _register_default_group() -> None:
    inner = c10d._get_default_group()
    if not isinstance(inner, ReloadableProcessGroup):
        c10d._update_default_pg(_wrap(inner, None, None))


def _default() -> ReloadableProcessGroup | None:
    default = dist.group.WORLD
    return default if isinstance(default, ReloadableProcessGroup) else None


def _wrap(inner: dist.ProcessGroup, options: Any, timeout: timedelta | None) -> ReloadableProcessGroup:
    backend, store = c10d._world.pg_map[inner]
    recipe = _Recipe(
        name=inner.group_name,
        ranks=tuple(c10d._world.pg_group_ranks[inner]),
        backend=str(backend),
        options=options,
        timeout=timeout or _timeout_of(inner),
        description=inner.group_desc,
        store=store,
    )
    group = ReloadableProcessGroup(inner, recipe)
    _state.groups.append(group)
    _enter(group)
    return group


def _timeout_of(inner: dist.ProcessGroup) -> timedelta:
    options = getattr(inner._get_backend(inner._device_types[0]), "options", None)
    return getattr(options, "_timeout", None) or c10d._get_default_timeout(dist.get_backend(inner))


def _attach(group: ReloadableProcessGroup, backend: str) -> None:
    """Make a new inner group in place of the one that is there, if any.

    Its name is the same on every member and one that no store key of an older group has.
    """
    recipe = group.recipe
    inner, _ = c10d._new_process_group_helper(
        len(recipe.ranks),
        group.rank(),
        list(recipe.ranks),
        dist.Backend(backend),
        c10d._get_default_store(),
        group_name=f"{recipe.name}@{_state.generation}",
        backend_options=recipe.options if backend == recipe.backend else None,
        timeout=recipe.timeout,
        group_desc=recipe.description,
    )
    c10d._world.pg_group_ranks[inner] = {rank: index for index, rank in enumerate(recipe.ranks)}
    _drop_inner(group)
    group.inner = inner
    _enter(group)


def _drop_inner(group: ReloadableProcessGroup) -> None:
    if group.inner is not None:
        _state.originals["destroy_process_group"](group.inner)
        group.inner = None


def _enter(group: ReloadableProcessGroup) -> None:
    """Let torch's look-ups by group find the reloadable group; the store stays the first one."""
    world, inner = c10d._world, group.alive()
    world.pg_map[group] = (world.pg_map[inner][0], group.recipe.store)
    world.pg_group_ranks[group] = world.pg_group_ranks[inner]
    world.pg_backend_config[group] = world.pg_backend_config[inner]


def _leave(group: ReloadableProcessGroup) -> None:
    for table in (c10d._world.pg_map, c10d._world.pg_group_ranks, c10d._world.pg_backend_config):
        table.pop(group, None)


def _meet(what: str) -> None:
    """Wait for every rank, through the store alone, at most the default group's timeout."""
    default = _default()
    if default is None:
        raise RuntimeError(f"can't {what} process groups: there is no default group")
    _state.generation += 1
    store, size, timeout = c10d._get_default_store(), default.size(), default.recipe.timeout
    key = f"slime/{what}/{_state.generation}"
    if store.add(key, 1) == size:
        store.set(f"{key}/all", "1")
    try:
        store.wait([f"{key}/all"], timeout)
    except RuntimeError as error:  # not every kind of store raises DistStoreError
        arrived = store.add(key, 0)
        raise RuntimeError(
            f"only {arrived} of {size} ranks came to {what} their process groups within {timeout}"
        ) from error


def _check_torch() -> None:
    wanted = {"group_size", "group_rank", "global_ranks_in_group", "backend", "store", "group_name"}
    wanted |= {"backend_options", "timeout", "group_desc"}
    missing = wanted - set(inspect.signature(c10d._new_process_group_helper).parameters)
    missing |= {
        n for n in ("_store_based_barrier", "_update_default_pg", "_get_default_store") if not hasattr(c10d, n)
    }
    tables = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config")
    missing |= {n for n in tables if not hasattr(c10d._world, n)}
    if missing:
        raise RuntimeError(
            f"torch {torch.__version__} lacks {sorted(missing)}, which reloadable process groups (written for torch "
            "2.13) need"
        )
