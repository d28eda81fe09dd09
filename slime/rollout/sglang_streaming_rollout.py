"""A generate function that reads the answer token by token: `--custom-generate-function-path
slime.rollout.sglang_streaming_rollout.generate_streaming`.

What has come is on the sample at any moment, so a task that is cancelled, or an engine that dies in the middle, costs
no tokens: with --partial-rollout the sample goes on from there.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson

from slime.rollout import sglang_rollout
from slime.rollout.engine_request import (
    next_payload,
    read_output,
    request_headers,
    router_url,
)
from slime.utils.http_utils import REQUEST_TIMEOUT, RETRIED_STATUS, HttpError, client
from slime.utils.types import Sample

RETRY_S = 1.0
LINE_BYTES = 64 * 2**20  # an event holds the log-probs of the whole answer so far


async def generate_streaming(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """As `sglang_rollout.generate`. A stream that breaks leaves the sample ABORTED with what has come.

    Raises:
        ValueError: with --use-rollout-routing-replay, whose arrays come with whole answers only.
    """
    if getattr(args, "use_rollout_routing_replay", False):
        raise ValueError("generate_streaming does not carry routed experts (--use-rollout-routing-replay)")
    state = sglang_rollout.GenerateState(args)
    payload = next_payload(args, state, sample, sampling_params)
    if payload is None:
        return sample
    url = router_url((args.sglang_router_ip, args.sglang_router_port), "/generate")
    sample.status = Sample.Status.ABORTED  # until the stream says how it ended
    done = 0
    try:
        async for event in _events(url, payload | {"stream": True}, request_headers(args, sample)):
            done = _take(args, sample, event, done)
    except (aiohttp.ClientError, HttpError) as error:  # an engine is gone: the sample goes on, or begins anew
        if isinstance(error, HttpError) and error.status not in RETRIED_STATUS:
            raise
        await asyncio.sleep(RETRY_S)
    skip = sampling_params.get("skip_special_tokens", False)
    response_ids = sample.tokens[len(sample.tokens) - sample.response_length :]
    sample.response = state.tokenizer.decode(response_ids, skip_special_tokens=skip)
    return sample


def _take(args: Namespace, sample: Sample, event: dict[str, Any], done: int) -> int:
    """Append what the event brings beyond `done` tokens; the tokens so far.

    SGLang sends all tokens so far in each event, or with --sglang-incremental-streaming-output the new ones alone.
    """
    meta = dict(event["meta_info"])
    entries = meta.get("output_token_logprobs") or []
    total = meta.get("output_token_logprobs_length", len(entries))
    meta["output_token_logprobs"] = new = entries[len(entries) - (total - done) :] if total > done else []
    tokens, log_probs = read_output(args, sample, {**event, "meta_info": meta}) if new else ([], [])
    sample.append_response_tokens(args, tokens=tokens, log_probs=log_probs, meta_info=meta)
    return total


async def _events(url: str, payload: dict[str, Any], headers: dict[str, str] | None) -> AsyncIterator[dict[str, Any]]:
    """The server-sent events of one request.

    Raises:
        HttpError: the request is refused, or an event is an error; names URL, status and body.
        aiohttp.ClientError: the connection fails.
    """
    limit = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT, sock_connect=10.0)
    async with client().post(url, json=payload, headers=headers, timeout=limit, read_bufsize=LINE_BYTES) as response:
        if response.status >= 400:
            body = await response.text(errors="replace")
            raise HttpError(f"POST {url}: status {response.status}: {body[:2000]}", url, response.status, body)
        async for line in response.content:
            text = line.strip()
            if not text.startswith(b"data:") or text == b"data: [DONE]":
                continue
            event = orjson.loads(text.removeprefix(b"data:"))
            if "meta_info" not in event:
                raise HttpError(
                    f"POST {url}: the stream ended with an error: {event}", url, response.status, str(event)
                )
            yield event
