"""Where a generate request goes: to the router, or past it to an engine.

sglang-router 0.3.2 takes requests apart and drops fields that it doesn't know, `return_routed_experts` among them. So
with --use-rollout-routing-replay requests go to the engines that the router knows, and are shared out here. slime's
own router passes them on whole.
"""

from __future__ import annotations

import time
import zlib
from typing import Any

from slime.rollout.engine_abort import worker_urls
from slime.rollout.engine_request import router_url
from slime.utils.types import Sample

REFRESH_S = 5.0  # engines come and go


class EngineList:
    """The engines behind one router, and who is next."""

    def __init__(self) -> None:
        self._urls: list[str] = []
        self._refreshed = -REFRESH_S
        self._next = 0

    async def choose(self, args: Any, session: str | None) -> str:
        """The engine of a session (always the same while the engines are), else of the next request in turn.

        Raises:
            RuntimeError: the router knows none.
        """
        if time.monotonic() - self._refreshed >= REFRESH_S or not self._urls:
            self._urls = sorted(await worker_urls(args))
            self._refreshed = time.monotonic()
        if not self._urls:
            raise RuntimeError(
                f"the router at {args.sglang_router_ip}:{args.sglang_router_port} knows no engine to send requests to"
            )
        self._next += 1
        place = zlib.crc32(session.encode()) if session else self._next
        return self._urls[place % len(self._urls)]


async def generate_url(args: Any, engines: EngineList, sample: Sample) -> str:
    """URL for the sample's generate request."""
    if getattr(args, "use_slime_router", False) or not getattr(args, "use_rollout_routing_replay", False):
        return router_url((args.sglang_router_ip, args.sglang_router_port), "/generate")
    return f"{await engines.choose(args, sample.session_id)}/generate"
