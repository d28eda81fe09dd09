"""Aborting servers (pitfall L10), against small HTTP servers that answer like SGLang's."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from slime.backends.sglang_utils.server_control import (
    abort_server_until_idle,
    abort_servers_until_idle,
    num_requests_from_load,
)
from slime.ray.ports import hold_ports
from slime.utils.http_utils import close_client


class Engine:
    """A server with `running` requests, of which each abort ends `per_abort`."""

    def __init__(self, running: int, per_abort: int) -> None:
        self.running, self.per_abort, self.aborts = running, per_abort, 0
        app = web.Application()
        app.router.add_post("/abort_request", self.abort)
        app.router.add_get("/v1/loads", self.loads)
        self._runner = web.AppRunner(app)

    async def abort(self, request: web.Request) -> web.Response:
        assert await request.json() == {"abort_all": True}
        self.aborts += 1
        self.running = max(0, self.running - self.per_abort)
        return web.Response()

    async def loads(self, request: web.Request) -> web.Response:
        return web.json_response({"loads": [{"num_running_reqs": self.running, "num_waiting_reqs": 0}]})

    async def __aenter__(self) -> str:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def __aexit__(self, *_: object) -> None:
        await close_client()
        await self._runner.cleanup()


def test_load_is_the_sum_over_ranks_of_running_and_waiting() -> None:
    ranks = [{"num_running_reqs": 2, "num_waiting_reqs": 1}, {"num_running_reqs": 0, "num_waiting_reqs": 4}]
    assert num_requests_from_load({"loads": ranks, "version": "0.5.23"}) == 7


@pytest.mark.parametrize("answer", [None, "x", {}, {"loads": 3}])
def test_another_answer_is_an_error(answer: Any) -> None:
    with pytest.raises(ValueError, match="/v1/loads"):
        num_requests_from_load(answer)


def test_aborts_again_until_the_server_is_idle() -> None:
    engine = Engine(running=5, per_abort=2)

    async def run() -> None:
        async with engine as url:
            await abort_server_until_idle(url, retry_interval=0.05)

    asyncio.run(run())
    assert (engine.running, engine.aborts) == (0, 3)


def test_a_server_that_never_gets_idle_is_given_up() -> None:
    async def run() -> None:
        async with Engine(running=1, per_abort=0) as url:
            with pytest.raises(TimeoutError, match=f"{url} still has 1 requests"):
                await abort_server_until_idle(url, retry_interval=0.05, deadline=0.3)

    asyncio.run(run())


def test_one_unreachable_server_does_not_keep_the_others_from_being_aborted(caplog: pytest.LogCaptureFixture) -> None:
    """L10: three engines, one closed."""
    first, second = Engine(3, 3), Engine(2, 2)

    async def run() -> tuple[list[str], list[str], str]:
        with hold_ports(1, 22300) as held:
            gone = f"http://127.0.0.1:{held.ports[0]}"
            async with first as url_1, second as url_2:
                return [url_1, url_2], await abort_servers_until_idle([url_1, gone, url_2]), gone

    urls, idle, gone = asyncio.run(run())
    assert idle == urls
    assert (first.running, second.running) == (0, 0)
    assert gone in caplog.text
