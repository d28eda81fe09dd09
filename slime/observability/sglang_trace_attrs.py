"""What SGLang's `meta_info` tells about one request, as span attributes, and the perf metrics made of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from slime.observability.metric_utils import compute_statistics, dict_add_prefix

# Attribute of a generate span → its key in meta_info.
_META_KEYS = {
    "prompt_tokens": "prompt_tokens",
    "completion_tokens": "completion_tokens",
    "cached_tokens": "cached_tokens",
    "queue_time": "queue_time",
    "e2e_latency": "e2e_latency",
    "decode_throughput": "decode_throughput",
    "sglang_request_id": "id",
}

_PREFILL = (
    "bootstrap_queue_duration",
    "bootstrap_duration",
    "alloc_wait_duration",
    "forward_duration",
    "transfer_queue_duration",
    "transfer_speed_gb_s",
    "transfer_total_mb",
    "retry_count",
)
_DECODE = ("prealloc_duration", "bootstrap_duration", "alloc_wait_duration", "transfer_duration", "forward_duration")
# The two stages of prefill/decode disaggregation; a server that has them reports them under these names.
_STAGE_KEYS = [f"prefill_{name}" for name in _PREFILL] + [f"decode_{name}" for name in _DECODE]

# Attribute of a generate span → perf metric.
_PERF_METRICS = {
    "e2e_latency": "request/e2e_latency",
    "queue_time": "request/queue_time",
    "decode_throughput": "decode/throughput",
    **{key: key.replace("_", "/", 1) for key in _STAGE_KEYS},
}


def build_sglang_meta_trace_attrs(meta: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a generate span from a response's `meta_info`; what the server did not report is left out."""
    attrs = {name: meta[key] for name, key in _META_KEYS.items() if meta.get(key) is not None}
    attrs |= {key: meta[key] for key in _STAGE_KEYS if meta.get(key) is not None}
    finish_reason = meta.get("finish_reason")
    if finish_reason:
        attrs["finish_reason"] = finish_reason["type"] if isinstance(finish_reason, dict) else finish_reason
    return attrs


def request_perf_metrics(samples: Iterable[Any]) -> dict[str, float]:
    """Statistics of the requests behind `samples`: `request/e2e_latency/{mean,median,max,min}` and the like.

    Every span that carries a server's figures counts, whatever its name, so streaming generation counts too.
    """
    values: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        trace = getattr(sample, "trace", None) or {}
        for event in trace.get("events", []):
            if event["type"] != "span_end":
                continue
            for attr, metric in _PERF_METRICS.items():
                if attr in event["attrs"]:
                    values[metric].append(float(event["attrs"][attr]))
    metrics: dict[str, float] = {}
    for metric, numbers in values.items():
        metrics |= dict_add_prefix(compute_statistics(numbers), f"{metric}/")
    return metrics
