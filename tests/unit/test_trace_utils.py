"""Traces that travel with samples."""

from __future__ import annotations

import asyncio
import json

import pytest

from slime.observability.trace_utils import (
    bind_trace,
    build_sglang_meta_trace_attrs,
    export_trace,
    import_trace,
    trace_event,
    trace_function,
    trace_next_attempt,
    trace_span,
)
from slime.utils.types import Sample


def events(sample: Sample) -> list[tuple[str, str]]:
    return [(event["type"], event["name"]) for event in sample.trace["events"]]


def test_spans_nest_and_survive_a_dump() -> None:
    sample = Sample(index=3, group_index=1)
    with trace_span(sample, "outer", attrs={"a": 1}), trace_span(sample, "inner") as span:
        span.set("b", 2)
        span.update({"c": 3})
        trace_event(sample, "tick")
    copy = Sample.from_dict(json.loads(json.dumps(sample.to_dict())))
    assert events(copy) == [
        ("span_start", "outer"),
        ("span_start", "inner"),
        ("event", "tick"),
        ("span_end", "inner"),
        ("span_end", "outer"),
    ]
    outer, inner, tick, inner_end, _ = copy.trace["events"]
    assert outer["attrs"] == {"a": 1} and outer["parent_span_id"] is None
    assert inner["parent_span_id"] == outer["span_id"] and tick["parent_span_id"] == inner["span_id"]
    assert inner_end["attrs"] == {"b": 2, "c": 3} and inner_end["span_id"] == inner["span_id"]
    assert (copy.trace["version"], copy.trace["sample_id"], copy.trace["group_id"]) == (1, 3, 1)


def test_concurrent_tasks_do_not_adopt_each_others_spans() -> None:
    samples = [Sample(index=i) for i in range(2)]

    async def generate(sample: Sample) -> None:
        with trace_span(sample, "generate"):
            await asyncio.sleep(0)
            with trace_span(sample, "request"):
                await asyncio.sleep(0)

    async def both() -> None:
        await asyncio.gather(*(generate(sample) for sample in samples))

    asyncio.run(both())
    for sample in samples:
        generate_start, request_start = sample.trace["events"][:2]
        assert request_start["parent_span_id"] == generate_start["span_id"]


def test_a_group_is_traced_on_every_sample() -> None:
    group = [[Sample(index=0)], [Sample(index=1)]]
    trace_event(group, "kept")
    assert [events(samples[0]) for samples in group] == [[("event", "kept")]] * 2


def test_an_exception_is_recorded_and_passed_on() -> None:
    sample = Sample()
    with pytest.raises(ValueError), trace_span(sample, "grade"):
        raise ValueError("no box")
    assert sample.trace["events"][-1]["attrs"] == {"error": "ValueError: no box"}


def test_without_a_target_nothing_happens() -> None:
    with trace_span(None, "nothing") as span:
        span.set("a", 1)
    trace_event(None, "nothing")


def test_decorator_on_functions_and_coroutines() -> None:
    @trace_function("grade", target="sample", attrs_getter=lambda sample, weight=1: {"weight": weight})
    def grade(sample: Sample, weight: int = 1) -> int:
        return weight

    @trace_function("generate", target_getter=lambda sample: sample)
    async def generate(sample: Sample) -> str:
        return "text"

    sample = Sample()
    assert grade(sample, weight=2) == 2
    assert asyncio.run(generate(sample)) == "text"
    assert [name for kind, name in events(sample) if kind == "span_end"] == ["grade", "generate"]
    assert sample.trace["events"][0]["attrs"] == {"weight": 2}
    with pytest.raises(ValueError, match="has no parameter 'smaple'"):
        trace_function("typo", target="smaple")(lambda sample: None)


def test_a_trace_goes_on_in_another_process() -> None:
    sample = Sample(index=7)
    with trace_span(sample, "local"):
        payload = json.loads(json.dumps(export_trace(bind_trace(sample))))
    remote = import_trace(payload)
    trace_event(remote, "remote")
    assert remote.carrier["trace_id"] == sample.trace["trace_id"]
    assert remote.carrier["events"][0]["parent_span_id"] == sample.trace["events"][0]["span_id"]


def test_attempts_are_numbered() -> None:
    sample = Sample()
    trace_event(sample, "first")
    trace_next_attempt(sample)
    trace_event(sample, "second")
    assert [event["attempt"] for event in sample.trace["events"]] == [0, 1, 1]


def test_sglang_meta_info_becomes_attributes() -> None:
    meta = {
        "id": "r1",
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "cached_tokens": 0,
        "e2e_latency": 0.5,
        "queue_time": None,
        "finish_reason": {"type": "length", "length": 2},
    }
    assert build_sglang_meta_trace_attrs(meta) == {
        "sglang_request_id": "r1",
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "cached_tokens": 0,
        "e2e_latency": 0.5,
        "finish_reason": "length",
    }
