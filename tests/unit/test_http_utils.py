"""HTTP client: what is retried, deadlines, proxies, one client per event loop (pitfalls L11, L12, P6, P11)."""

from __future__ import annotations

import asyncio
import pickle
import socket
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from slime.ray.ports import hold_ports
from slime.utils import http_utils
from slime.utils.http_utils import HttpError, client, close_client, get, get_host_info, get_rollout_num_engines, post

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serve(handler: Handler, port: int = 0) -> AsyncIterator[str]:
    """A server on 127.0.0.1 that answers everything with `handler`; its URL. Closes this loop's client at the end."""
    runner = web.ServerRunner(web.Server(handler), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await close_client()
        await runner.cleanup()


class Answers:
    """Answers with one status after the other, the last one for ever, and counts the requests."""

    def __init__(self, *statuses: int, headers: dict[str, str] | None = None) -> None:
        self.statuses, self.headers, self.count = statuses, headers, 0

    async def __call__(self, request: web.Request) -> web.Response:
        status = self.statuses[min(self.count, len(self.statuses) - 1)]
        self.count += 1
        return web.json_response({"method": request.method, "status": status}, status=status, headers=self.headers)


def test_post_sends_json_and_headers_and_decodes_the_answer() -> None:
    async def echo(request: web.Request) -> web.Response:
        return web.json_response({"body": await request.json(), "key": request.headers["X-Key"]})

    async def run() -> Any:
        async with serve(echo) as url:
            return await post(f"{url}/generate", {"input_ids": [1, 2]}, headers={"X-Key": "k"})

    assert asyncio.run(run()) == {"body": {"input_ids": [1, 2]}, "key": "k"}


def test_get_decodes_json_and_returns_other_answers_as_text() -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.json_response([1]) if request.path == "/json" else web.Response(text="OK")

    async def run() -> Any:
        async with serve(handler) as url:
            return await get(f"{url}/json"), await get(f"{url}/text")

    assert asyncio.run(run()) == ([1], "OK")


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_a_refusal_is_not_retried_and_shows_url_and_body(status: int) -> None:
    """L12."""
    answers = Answers(status)

    async def run() -> str:
        async with serve(answers) as url:
            with pytest.raises(HttpError) as caught:
                await post(f"{url}/workers", {})
            assert caught.value.status == status
            assert f"{url}/workers" in str(caught.value) and f'"status": {status}' in str(caught.value)
            return str(caught.value)

    asyncio.run(run())
    assert answers.count == 1


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_what_can_pass_is_retried(status: int) -> None:
    answers = Answers(status, status, 200)

    async def run() -> Any:
        async with serve(answers) as url:
            return await post(url, {})

    assert asyncio.run(run())["status"] == 200
    assert answers.count == 3


def test_retries_end_at_the_deadline_and_at_the_count() -> None:
    answers = Answers(503)

    async def run() -> None:
        async with serve(answers) as url:
            started = time.monotonic()
            with pytest.raises(HttpError, match=r"status 503 after \d+ attempts"):
                await post(url, {}, retry_seconds=0.5)
            assert time.monotonic() - started < 2.0
            answers.count = 0
            with pytest.raises(HttpError, match="status 503 after 3 attempts"):
                await post(url, {}, max_retries=2)
            assert answers.count == 3

    asyncio.run(run())


def test_retry_after_is_obeyed() -> None:
    answers = Answers(503, 200, headers={"Retry-After": "1"})

    async def run() -> float:
        async with serve(answers) as url:
            started = time.monotonic()
            await get(url)
            return time.monotonic() - started

    assert asyncio.run(run()) >= 1.0


def test_a_server_that_comes_up_late_is_reached() -> None:
    async def run() -> Any:
        with hold_ports(1, 22000) as held:
            request = asyncio.create_task(post(f"http://127.0.0.1:{held.ports[0]}/", {}))
            await asyncio.sleep(0.3)
            async with serve(Answers(200), held.ports[0]):
                return await request

    assert asyncio.run(run())["status"] == 200


def test_a_server_that_is_not_there_is_named() -> None:
    async def run() -> None:
        with hold_ports(1, 22100) as held:
            url = f"http://127.0.0.1:{held.ports[0]}/x"
            with pytest.raises(HttpError, match=f"POST {url}: no answer after 2 attempts: ClientConnector") as caught:
                await post(url, {}, max_retries=1)
            assert caught.value.status is None
            await close_client()

    asyncio.run(run())


def test_a_server_that_never_answers_costs_the_timeout() -> None:
    async def never(request: web.Request) -> web.Response:
        await asyncio.sleep(60)
        return web.Response()

    async def run() -> None:
        async with serve(never) as url:
            started = time.monotonic()
            with pytest.raises(HttpError, match="no answer"):
                await post(url, {}, max_retries=0, timeout=0.3)
            assert time.monotonic() - started < 3.0

    asyncio.run(run())


def test_an_answer_that_breaks_off_is_retried() -> None:
    count = 0

    async def breaks(request: web.Request) -> web.StreamResponse:
        nonlocal count
        count += 1
        if count > 1:
            return web.json_response({"whole": True})
        response = web.StreamResponse(headers={"Content-Length": "100", "Content-Type": "application/json"})
        await response.prepare(request)
        await response.write(b"{")
        assert request.transport is not None
        request.transport.abort()
        return response

    async def run() -> Any:
        async with serve(breaks) as url:
            return await post(url, {})

    assert asyncio.run(run()) == {"whole": True}
    assert count == 2


def test_proxies_in_the_environment_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """L11: HTTP_PROXY names a port where nothing listens; the local server is reached all the same."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)

    async def run() -> Any:
        async with serve(Answers(200)) as url:
            return await post(url, {}, max_retries=0)

    assert asyncio.run(run())["status"] == 200


def test_connections_are_reused_and_each_loop_has_its_client() -> None:
    peers = set()

    async def note(request: web.Request) -> web.Response:
        assert request.transport is not None
        peers.add(request.transport.get_extra_info("peername"))
        return web.Response(text="OK")

    async def run() -> int:
        async with serve(note) as url:
            for _ in range(5):
                await get(url)
            return id(client())

    first = asyncio.run(run())
    assert len(peers) == 1
    assert asyncio.run(run()) != first
    assert not http_utils._clients


def test_many_requests_at_once() -> None:
    async def slow(request: web.Request) -> web.Response:
        await asyncio.sleep(0.2)
        return web.json_response(await request.json())

    async def run() -> list[Any]:
        async with serve(slow) as url:
            return await asyncio.gather(*(post(url, index) for index in range(200)))

    started = time.monotonic()
    assert asyncio.run(run()) == list(range(200))
    assert time.monotonic() - started < 10.0


def test_an_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(HttpError("POST u: status 400: b", "u", 400, "b")))
    assert (str(error), error.url, error.status, error.body) == ("POST u: status 400: b", "u", 400, "b")


def test_host_info_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """P11: an IPv6 address comes without brackets; who makes a URL adds them."""
    monkeypatch.setenv("SLIME_HOST_IP", "[fd00::7]")
    assert get_host_info() == (socket.gethostname(), "fd00::7")


def test_host_info_without_it_is_an_address_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLIME_HOST_IP", raising=False)
    address = get_host_info()[1]
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as sock:
        sock.bind((address, 0))


@pytest.mark.parametrize(("gpus", "per_engine", "engines"), [(8, 2, 4), (0, 1, 0), (None, 1, 0)])
def test_number_of_engines(gpus: int | None, per_engine: int, engines: int) -> None:
    """P6."""
    args = Namespace(rollout_num_gpus=gpus, rollout_num_gpus_per_engine=per_engine)
    assert get_rollout_num_engines(args) == engines
