"""What every request to slime's own router passes through."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable

from aiohttp import web

logger = logging.getLogger(__name__)

SLOW_SECONDS = 60.0


async def slow_requests(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Note the requests that took long in the router's log, and tell the client how long its own took."""
    started = time.monotonic()
    response = await handler(request)
    seconds = time.monotonic() - started
    if seconds > SLOW_SECONDS:
        logger.warning("%s %s took %.0f s", request.method, request.path, seconds)
    if not response.prepared:
        response.headers["X-Router-Seconds"] = f"{seconds:.3f}"
    return response
