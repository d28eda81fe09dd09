"""HTTP to engines, routers and services: a pooled client per event loop, deadlines, retries only where they help.

Proxies in the environment are ignored: these calls stay inside the cluster, and a proxy would answer 503 for them.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
import weakref
from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import aiohttp
import orjson

from slime.ray.ports import find_available_port, is_port_available
from slime.utils.host_info import get_host_info

if TYPE_CHECKING:
    from multidict import CIMultiDictProxy

__all__ = [
    "HttpError",
    "find_available_port",
    "get",
    "get_host_info",
    "get_rollout_num_engines",
    "init_http_client",
    "is_port_available",
    "post",
]

CONNECT_TIMEOUT = 10.0
REQUEST_TIMEOUT = 14400.0  # one attempt; a long answer takes long
RETRY_SECONDS = 120.0  # how long a service may be away before its callers give up
MAX_RETRIES = 60
BACKOFF_FIRST, BACKOFF_MAX = 0.1, 5.0
# 408 and 429 ask for another try, 500 may be a worker that died under the request, the others will be back.
RETRIED_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_BODY_IN_MESSAGE = 2000

_clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, aiohttp.ClientSession] = weakref.WeakKeyDictionary()


class HttpError(RuntimeError):
    """An answer that is not a success, or none at all before the deadline.

    Attributes:
        url: what was asked.
        status: the HTTP status, or None when no answer came.
        body: the answer's text.
    """

    def __init__(self, message: str, url: str = "", status: int | None = None, body: str = "") -> None:
        super().__init__(message)
        self.url, self.status, self.body = url, status, body


def _error(method: str, url: str, status: int | None, body: str, note: str = "") -> HttpError:
    what = "no answer" if status is None else f"status {status}"
    return HttpError(f"{method} {url}: {what}{note}: {body[:_BODY_IN_MESSAGE]}", url, status, body)


def client() -> aiohttp.ClientSession:
    """The running event loop's client; made at the first call and closed with the loop's last reference."""
    loop = asyncio.get_running_loop()
    session = _clients.get(loop)
    if session is None or session.closed:
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=300),  # callers bound their own concurrency
            timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT, sock_connect=CONNECT_TIMEOUT),
            trust_env=False,
        )
        _clients[loop] = session
    return session


async def close_client() -> None:
    """Close the running event loop's client, if it has one."""
    session = _clients.pop(asyncio.get_running_loop(), None)
    if session is not None:
        await session.close()


def init_http_client(args: Namespace) -> None:
    """Kept for plug-ins that call it: the client makes itself at the first request."""


async def post(
    url: str,
    payload: Any,
    max_retries: int = MAX_RETRIES,
    headers: Mapping[str, str] | None = None,
    *,
    timeout: float = REQUEST_TIMEOUT,
    retry_seconds: float = RETRY_SECONDS,
) -> Any:
    """POST `payload` as JSON; the decoded answer (text when it is not JSON).

    A connection that fails and the statuses in `RETRIED_STATUS` are tried again with backoff, until `max_retries` or
    `retry_seconds` since the first failure. Any other status that is no success raises at once.

    Args:
        timeout: seconds for one attempt, answer included.

    Raises:
        HttpError: naming URL, status and body.
    """
    return await _request("POST", url, max_retries, timeout, retry_seconds, json=payload, headers=headers)


async def get(
    url: str, *, max_retries: int = MAX_RETRIES, timeout: float = 30.0, retry_seconds: float = RETRY_SECONDS
) -> Any:
    """GET; the decoded answer. Retries and errors as for `post`."""
    return await _request("GET", url, max_retries, timeout, retry_seconds)


async def _request(
    method: str, url: str, max_retries: int, timeout: float, retry_seconds: float, **options: Any
) -> Any:
    limit = aiohttp.ClientTimeout(total=timeout, sock_connect=min(timeout, CONNECT_TIMEOUT))
    give_up: float | None = None
    for attempt in range(max_retries + 1):
        try:
            async with client().request(method, url, timeout=limit, **options) as response:
                if response.status < 400:
                    return await _decode(response)
                body = await response.text(errors="replace")
                failure = _error(method, url, response.status, body)
                wait = _retry_after(response.headers)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError) as error:
            failure = _error(method, url, None, f"{type(error).__name__}: {error}")
            wait = None
        if failure.status is not None and failure.status not in RETRIED_STATUS:
            raise failure
        now = time.monotonic()
        give_up = now + retry_seconds if give_up is None else give_up
        wait = _backoff(attempt) if wait is None else wait
        if attempt == max_retries or now + wait > give_up:
            raise _error(method, url, failure.status, failure.body, f" after {attempt + 1} attempts") from failure
        await asyncio.sleep(wait)
    raise AssertionError("unreachable: the last attempt returns or raises")


async def _decode(response: aiohttp.ClientResponse) -> Any:
    if "json" in response.headers.get("Content-Type", ""):
        content = await response.read()
        try:
            return orjson.loads(content)  # a long answer's log-probs: three times as fast as json
        except orjson.JSONDecodeError:
            return json.loads(content)  # which takes NaN and Infinity
    return await response.text()


def _backoff(attempt: int) -> float:
    """Doubling, up to a bound, with jitter so that many callers don't come back at the same moment."""
    return min(BACKOFF_MAX, BACKOFF_FIRST * 2**attempt) * (0.5 + 0.5 * random.random())


def _retry_after(headers: CIMultiDictProxy[str]) -> float | None:
    value = headers.get("Retry-After", "")
    return float(value) if value.isdigit() else None


def get_rollout_num_engines(args: Namespace) -> int:
    """How many engines serve the trained model."""
    counted: int | None = getattr(args, "rollout_num_engines", None)  # where not all engines are alike
    if counted is not None:
        return counted
    return (args.rollout_num_gpus or 0) // args.rollout_num_gpus_per_engine
