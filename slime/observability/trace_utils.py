"""Spans and events of a sample's life, kept on the sample itself (`sample.trace`) and thus in every dump.

`sample.trace = {version, trace_id, sample_id, group_id, attempt, events}`; an event is
`{type: "span_start" | "span_end" | "event", ts, name, span_id, parent_span_id, attrs}` with `ts` in seconds since the
epoch. Spans nest per task and thread.
"""

from __future__ import annotations

import functools
import inspect
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from slime.observability.sglang_trace_attrs import build_sglang_meta_trace_attrs
from slime.utils.types import Sample

__all__ = [
    "TraceHandle",
    "TraceSpanContext",
    "bind_trace",
    "bind_trace_carrier",
    "build_sglang_meta_trace_attrs",
    "export_trace",
    "import_trace",
    "trace_event",
    "trace_function",
    "trace_next_attempt",
    "trace_span",
]

TRACE_VERSION = 1
Attrs = dict[str, Any]


@dataclass
class TraceHandle:
    """A trace, and the span under which new ones nest."""

    carrier: Attrs
    parent_span_id: str | None = None


Target = Sample | TraceHandle | Sequence[Sample | TraceHandle]

# trace_id → id of the span that is open in this task.
_open_spans: ContextVar[dict[str, str]] = ContextVar("slime_open_spans", default={})  # noqa: B039 (never mutated)


class TraceSpanContext:
    """What `trace_span` yields: attributes set here are written when the span ends."""

    def __init__(self) -> None:
        self._attrs: Attrs = {}

    def set(self, key: str, value: Any) -> None:
        self._attrs[key] = value

    def update(self, attrs: Attrs | None) -> None:
        self._attrs.update(attrs or {})

    set_attr = set
    update_attrs = update

    def build_end_attrs(self) -> Attrs:
        return dict(self._attrs)


def bind_trace(sample: Sample) -> TraceHandle:
    """The sample's trace, begun when it has none."""
    if getattr(sample, "trace", None) is None:
        handle = bind_trace_carrier(None, sample_id=sample.index, group_id=sample.group_index)
        sample.trace = handle.carrier  # type: ignore[attr-defined]
    return TraceHandle(sample.trace)  # type: ignore[attr-defined]


def bind_trace_carrier(
    carrier: Attrs | None,
    *,
    trace_id: str | None = None,
    sample_id: int | str | None = None,
    group_id: int | str | None = None,
    attempt: int = 0,
    parent_span_id: str | None = None,
) -> TraceHandle:
    """A handle on `carrier`, a trace kept elsewhere than on a sample; missing entries are filled in."""
    carrier = carrier if carrier is not None else {}
    carrier.setdefault("version", TRACE_VERSION)
    carrier.setdefault("trace_id", trace_id or secrets.token_hex(8))
    carrier.setdefault("events", [])
    carrier.setdefault("sample_id", sample_id)
    carrier.setdefault("group_id", group_id)
    carrier.setdefault("attempt", attempt)
    return TraceHandle(carrier, parent_span_id)


def export_trace(handle: TraceHandle) -> Attrs:
    """Plain values that identify the trace and the open span, to send to another process."""
    identity = {key: handle.carrier[key] for key in ("version", "trace_id", "sample_id", "group_id", "attempt")}
    return {**identity, "parent_span_id": _parent(handle)}


def import_trace(payload: Attrs, carrier: Attrs | None = None) -> TraceHandle:
    """Go on with an exported trace: spans made with the handle nest under the span that was open at the export."""
    ids = {key: payload.get(key) for key in ("trace_id", "sample_id", "group_id", "parent_span_id")}
    return bind_trace_carrier(carrier, attempt=payload.get("attempt", 0), **ids)


def trace_event(target: Target | None, name: str, *, attrs: Attrs | None = None) -> None:
    """Record that something happened now."""
    for handle in _handles(target):
        _append(handle, "event", name, secrets.token_hex(8), _parent(handle), attrs)


@contextmanager
def trace_span(
    target: Target | None, name: str, *, attrs: Attrs | None = None, record_error: bool = True
) -> Iterator[TraceSpanContext]:
    """Record a span around the block on every trace of `target`; an exception is noted as attribute `error`."""
    context = TraceSpanContext()
    spans = [(handle, _parent(handle), secrets.token_hex(8)) for handle in _handles(target)]
    for handle, parent, span_id in spans:
        _append(handle, "span_start", name, span_id, parent, attrs)
    opened = {handle.carrier["trace_id"]: span_id for handle, _, span_id in spans}
    token = _open_spans.set({**_open_spans.get(), **opened})
    try:
        yield context
    except BaseException as error:
        if record_error:
            context.set("error", f"{type(error).__name__}: {error}")
        raise
    finally:
        _open_spans.reset(token)
        for handle, parent, span_id in spans:
            _append(handle, "span_end", name, span_id, parent, context.build_end_attrs())


def trace_next_attempt(target: Target | None, *, attrs: Attrs | None = None) -> None:
    """The sample is tried again: later events belong to the next attempt."""
    for handle in _handles(target):
        handle.carrier["attempt"] += 1
    trace_event(target, "next_attempt", attrs=attrs)


def trace_function(
    name: str,
    *,
    target: str | None = None,
    target_getter: Callable[..., Target | None] | None = None,
    attrs_getter: Callable[..., Attrs | None] | None = None,
    record_error: bool = True,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: a span around each call of a function or coroutine function.

    Args:
        target: name of the parameter that holds the traced sample(s); or
        target_getter, attrs_getter: called with the call's own arguments.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)
        if target is not None and target not in signature.parameters:
            raise ValueError(f"trace_function: {function.__qualname__} has no parameter {target!r}")

        def span(args: tuple[Any, ...], kwargs: Attrs) -> Any:
            if target is not None:
                found = signature.bind(*args, **kwargs).arguments.get(target)
            else:
                found = target_getter(*args, **kwargs) if target_getter is not None else None
            attrs = attrs_getter(*args, **kwargs) if attrs_getter is not None else None
            return trace_span(found, name, attrs=attrs, record_error=record_error)

        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def traced_async(*args: Any, **kwargs: Any) -> Any:
                with span(args, kwargs):
                    return await function(*args, **kwargs)

            return traced_async

        @functools.wraps(function)
        def traced(*args: Any, **kwargs: Any) -> Any:
            with span(args, kwargs):
                return function(*args, **kwargs)

        return traced

    return decorate


def _handles(target: Any) -> list[TraceHandle]:
    """The traces of a sample, a handle, or a (nested) list of them; none for None."""
    if target is None:
        return []
    if isinstance(target, TraceHandle):
        return [target]
    if isinstance(target, list | tuple):
        return [handle for item in target for handle in _handles(item)]
    return [bind_trace(target)]


def _parent(handle: TraceHandle) -> str | None:
    return _open_spans.get().get(handle.carrier["trace_id"], handle.parent_span_id)


def _append(handle: TraceHandle, kind: str, name: str, span_id: str, parent: str | None, attrs: Attrs | None) -> None:
    handle.carrier["events"].append(
        {
            "type": kind,
            "ts": time.time(),
            "name": name,
            "span_id": span_id,
            "parent_span_id": parent,
            "attempt": handle.carrier["attempt"],
            "attrs": dict(attrs or {}),
        }
    )
