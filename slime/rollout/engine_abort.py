"""Stopping all generation on the engines, in bounded time."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from slime.rollout.engine_request import router_url
from slime.utils.http_utils import get, post

logger = logging.getLogger(__name__)

REQUEST_LIMIT_S = 10.0
DRAIN_LIMIT_S = 120.0  # then tasks are cancelled
REPEAT_S = 1.0  # requests that were on their way arrive after the first call


async def worker_urls(args: Any) -> list[str]:
    """Addresses of the engines that the router knows; none, with a warning, when it doesn't answer."""
    url = router_url((args.sglang_router_ip, args.sglang_router_port), "/workers")
    try:
        answer = await asyncio.wait_for(get(url), REQUEST_LIMIT_S)
    except Exception as error:
        logger.warning("no list of engines to abort from %s: %s", url, error)
        return []
    return [worker["url"] for worker in answer["workers"]]


async def abort_engines(urls: list[str]) -> None:
    """Tell every engine to abort all its requests; one that can't be reached costs a warning."""
    results = await asyncio.gather(*(_abort_engine(url) for url in urls), return_exceptions=True)
    for url, result in zip(urls, results, strict=True):
        if isinstance(result, Exception):
            logger.warning("abort of engine %s failed: %s", url, result)


async def _abort_engine(url: str) -> None:
    call = post(f"{url}/abort_request", {"abort_all": True}, max_retries=0)
    await asyncio.wait_for(call, REQUEST_LIMIT_S)


async def drain(args: Any, tasks: set[asyncio.Task[Any]]) -> set[asyncio.Task[Any]]:
    """Abort until every task has ended, at most DRAIN_LIMIT_S; what still runs then is cancelled.

    Returns:
        The cancelled tasks; all others are done.
    """
    deadline = time.monotonic() + DRAIN_LIMIT_S
    urls: list[str] = []
    running = tasks
    while running and time.monotonic() < deadline:
        urls = urls or await worker_urls(args)
        await abort_engines(urls)
        _, running = await asyncio.wait(running, timeout=REPEAT_S)
    for task in running:
        task.cancel()
    if running:
        logger.warning("%d groups did not end %d s after the abort: cancelled", len(running), DRAIN_LIMIT_S)
        await asyncio.wait(running, timeout=REQUEST_LIMIT_S)
    return running
