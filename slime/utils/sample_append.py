"""How `Sample.append_response_tokens` folds one engine reply into a sample."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from slime.utils.types import Sample

TOP_P_IDS = ("top_p_token_ids", "top_p_kept_token_ids")
TOP_P_OFFSETS = ("top_p_token_offsets", "top_p_kept_token_offsets")


def append_tokens(sample: Sample, tokens: list[int], log_probs: list[float] | None, trainable: bool) -> None:
    """Extend tokens, mask and log-probs; trainable tokens bring log-probs, others must not."""
    if trainable and tokens and (log_probs is None or len(log_probs) != len(tokens)):
        given = "none" if log_probs is None else len(log_probs)
        raise ValueError(f"{sample.name()}: {len(tokens)} trainable tokens need as many log_probs, got {given}")
    if not trainable and log_probs is not None:
        raise ValueError(f"{sample.name()}: tokens that are not trained must not bring log_probs")
    if sample.rollout_log_probs is None and sample.response_length > 0:
        raise ValueError(
            f"{sample.name()}: rollout_log_probs is missing for the {sample.response_length} response tokens so far"
        )
    if sample.loss_mask is None:
        sample.loss_mask = [1] * sample.response_length
    if sample.rollout_log_probs is None:
        sample.rollout_log_probs = []
    sample.tokens = [*sample.tokens, *tokens]
    sample.loss_mask = [*sample.loss_mask, *([int(trainable)] * len(tokens))]
    sample.rollout_log_probs = [*sample.rollout_log_probs, *(log_probs or ([0.0] * len(tokens)))]
    sample.response_length += len(tokens)


def append_engine_arrays(
    sample: Sample, args: Any, num_tokens: int, trainable: bool, meta_info: dict[str, Any] | None
) -> None:
    """Take the per-token arrays that some requests ask for: nucleus token sets and routed experts."""
    meta_info = meta_info or {}
    ids, offsets = decode_int32_meta_array(meta_info, TOP_P_IDS), decode_int32_meta_array(meta_info, TOP_P_OFFSETS)
    if ids is not None and offsets is not None and trainable:
        _append_top_p(sample, ids.tolist(), offsets.tolist(), num_tokens)
    elif sample.rollout_top_p_token_offsets is not None:
        last = sample.rollout_top_p_token_offsets[-1]
        sample.rollout_top_p_token_offsets = [*sample.rollout_top_p_token_offsets, *([last] * num_tokens)]
    experts = decode_int32_meta_array(meta_info, "routed_experts")
    if experts is not None:
        _append_routed_experts(sample, args, experts, meta_info.get("routed_experts_start_len", 0))


def _append_top_p(sample: Sample, ids: list[int], offsets: list[int], num_tokens: int) -> None:
    if len(offsets) != num_tokens + 1:
        raise ValueError(f"{sample.name()}: {len(offsets)} top-p offsets for {num_tokens} tokens (expected one more)")
    old_ids = sample.rollout_top_p_token_ids or []
    old_offsets = sample.rollout_top_p_token_offsets or [0] * (sample.response_length - num_tokens + 1)
    sample.rollout_top_p_token_ids = [*old_ids, *ids]
    sample.rollout_top_p_token_offsets = [*old_offsets, *(old_offsets[-1] + offset for offset in offsets[1:])]


def _append_routed_experts(sample: Sample, args: Any, experts: np.ndarray, start_len: int) -> None:
    """Shape [tokens - 1, num_layers, topk]; rows before `start_len` are kept from the earlier request.

    Row t holds the experts of token t, so the rows reach up to the token before the last, which the engine has only
    sampled and not yet read.
    """
    import torch

    if getattr(args, "num_layers", None) is None:
        raise ValueError("routed experts need args.num_layers and args.moe_router_topk for their shape")
    if experts.size % (args.num_layers * args.moe_router_topk):
        raise ValueError(
            f"{sample.name()}: {experts.size} routed experts don't divide into {args.num_layers} layers x top "
            f"{args.moe_router_topk}"
        )
    rows = torch.from_numpy(experts.copy()).reshape(-1, args.num_layers, args.moe_router_topk)
    if start_len:
        earlier = sample.rollout_routed_experts
        if earlier is None or len(earlier) < start_len:
            raise ValueError(
                f"{sample.name()}: routed experts from token {start_len} on, but those before it are missing"
            )
        rows = torch.cat([earlier[:start_len], rows])
    if len(rows) != len(sample.tokens) - 1:
        raise ValueError(
            f"{sample.name()}: {len(rows)} rows of routed experts for {len(sample.tokens)} tokens (expected one less)"
        )
    sample.rollout_routed_experts = rows


def read_terminal_info(sample: Sample, meta_info: dict[str, Any]) -> None:
    """Counters, weight versions and status of a request that is finished."""
    sample.spec_info.add(meta_info)
    sample.prefix_cache_info.add(meta_info)
    sample.weight_versions = [*sample.weight_versions, *_weight_versions(meta_info)]
    reason = meta_info["finish_reason"]
    kind = reason["type"] if isinstance(reason, dict) else reason
    statuses = {
        "length": sample.Status.TRUNCATED,
        "abort": sample.Status.ABORTED,
        "stop": sample.Status.COMPLETED,
    }
    if kind not in statuses:
        raise ValueError(f"{sample.name()}: unknown finish reason {reason!r}; known are {sorted(statuses)}")
    sample.status = statuses[kind]


def _weight_versions(meta_info: dict[str, Any]) -> Iterable[str]:
    """Each version once, in the order in which it made tokens of the request."""
    spans = meta_info.get("weight_versions")
    if spans:
        return list(dict.fromkeys(str(span["version"]) for span in spans))
    return [str(meta_info["weight_version"])] if meta_info.get("weight_version") is not None else []


def decode_int32_meta_array(meta_info: dict[str, Any], keys: str | Iterable[str]) -> np.ndarray | None:
    """The first of `keys` in `meta_info` as int32 array, from base64 bytes or a list; None when there is none."""
    for key in (keys,) if isinstance(keys, str) else keys:
        value = meta_info.get(key)
        if value is not None:
            if isinstance(value, str):
                return np.frombuffer(base64.b64decode(value), dtype=np.int32)
            return np.asarray(value, dtype=np.int32).reshape(-1)
    return None
