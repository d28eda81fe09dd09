"""Stopping what servers are generating, and waiting until they are idle."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

from slime.utils.http_utils import HttpError, get, post

logger = logging.getLogger(__name__)

ABORT_RETRY_INTERVAL_SECONDS = 1.0
ABORT_DEADLINE_SECONDS = 60.0
_REQUEST_SECONDS = 10.0


def num_requests_from_load(load: Any) -> int:
    """Requests that run or wait on a server, from the answer of GET /v1/loads.

    Raises:
        ValueError: the answer has another form.
    """
    ranks = load.get("loads") if isinstance(load, dict) else None
    if not isinstance(ranks, list):
        raise ValueError(f"GET /v1/loads answered {load!r}, not an object with a list `loads` (sglang 0.5.23)")
    return sum(int(rank["num_running_reqs"]) + int(rank["num_waiting_reqs"]) for rank in ranks)


async def abort_server_until_idle(
    url: str,
    retry_interval: float = ABORT_RETRY_INTERVAL_SECONDS,
    deadline: float = ABORT_DEADLINE_SECONDS,
) -> None:
    """Abort every request of one server until none runs or waits.

    Requests that arrive meanwhile are aborted too.

    Raises:
        HttpError: the server does not answer.
        TimeoutError: it still has requests after `deadline` seconds.
    """
    give_up = time.monotonic() + deadline
    while True:
        await post(f"{url}/abort_request", {"abort_all": True}, max_retries=1, timeout=_REQUEST_SECONDS)
        for _ in range(20):
            load = await get(f"{url}/v1/loads?include=core", max_retries=1, timeout=_REQUEST_SECONDS)
            left = num_requests_from_load(load)
            if left == 0:
                return
            if time.monotonic() > give_up:
                raise TimeoutError(f"{url} still has {left} requests {deadline:.0f} s after they were aborted")
            await asyncio.sleep(retry_interval / 20)


async def abort_servers_until_idle(urls: Sequence[str]) -> list[str]:
    """Abort every request of all servers; a server that can't be reached is only logged, the others are served.

    Returns:
        The URLs of the servers that are idle.
    """
    results = await asyncio.gather(*(abort_server_until_idle(url) for url in urls), return_exceptions=True)
    idle = []
    for url, result in zip(urls, results, strict=True):
        if isinstance(result, HttpError | TimeoutError):
            logger.warning("could not abort the requests of %s: %s", url, result)
        elif isinstance(result, BaseException):
            raise result
        else:
            idle.append(url)
    return idle
