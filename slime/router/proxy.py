"""Forwards requests to engines, and tries another engine when one does not answer."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import aiohttp
from aiohttp import web

from slime.router.workers import Worker, WorkerPool

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
MAX_TRIES = 3  # a request that is the death of engines must not be the death of all
# An engine that is going down answers so. 500 is also what a request gets that the engine stumbles over: it is passed
# on once all that were tried have stumbled.
RETRIED_STATUS = frozenset({500, 502, 503, 504})
_NO_ANSWER = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError)
# of one connection, or about a body that is decoded here
_HOP_HEADERS = frozenset(
    {"connection", "keep-alive", "transfer-encoding", "upgrade", "te", "trailer", "host", "content-length",
     "content-encoding", "accept-encoding", "date", "server"}
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Answer:
    """What an engine answered."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def is_success(self) -> bool:
        return self.status < 400

    def response(self, body: bytes | None = None) -> web.Response:
        """It as the router's own answer, with another body if one is given."""
        content = self.body if body is None else body
        return web.Response(status=self.status, headers=_kept(self.headers), body=content)


class NoWorkers(web.HTTPServiceUnavailable):
    """No engine is registered, or none of them answers."""

    def __init__(self, reason: str) -> None:
        error = {"error": {"code": "no_available_workers", "message": reason}}
        super().__init__(text=json.dumps(error), content_type="application/json")


class Proxy:
    """Sends requests on to the engines of a pool.

    Args:
        timeout: seconds for a request, answer included.

    Attributes:
        retries: requests that were sent to another engine so far.
    """

    def __init__(self, pool: WorkerPool, timeout: float) -> None:
        self.pool = pool
        self.retries = 0
        self._timeout = aiohttp.ClientTimeout(total=timeout, sock_connect=CONNECT_SECONDS)
        self._client: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        # No proxy of the environment: engines are inside the cluster. Bodies are passed on as they are.
        self._client = aiohttp.ClientSession(connector=connector, timeout=self._timeout, trust_env=False)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    async def ask(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str], session: str | None = None
    ) -> Answer:
        """The whole answer of the first engine that gives one.

        Raises:
            NoWorkers: there is none.
            HTTPGatewayTimeout: an engine has not finished in time.
        """
        failed: Answer | None = None
        tried: list[Worker] = []
        while (worker := self._next(session, tried)) is not None:
            try:
                answer = await self._ask_one(worker, method, path, body, headers)
            except _NO_ANSWER as error:
                self._note_failure(worker, error)
                continue
            except TimeoutError:
                raise web.HTTPGatewayTimeout(text=f"{worker.url} has not finished in time") from None
            if answer.status not in RETRIED_STATUS:
                return answer
            failed = answer
        if failed is not None:
            return failed
        raise NoWorkers(f"none of {len(tried)} engines answers" if tried else "no engine is registered")

    async def stream(self, request: web.Request, body: bytes, session: str | None = None) -> web.StreamResponse:
        """Pass an answer on as it comes. Another engine is tried until one has begun to answer.

        Raises:
            NoWorkers: none has.
        """
        tried: list[Worker] = []
        while (worker := self._next(session, tried)) is not None:
            response = web.StreamResponse()
            try:
                with _counted(worker):
                    async with self._request(worker, request.method, request.path_qs, body, request.headers) as answer:
                        response.set_status(answer.status)
                        response.headers.update(_kept(answer.headers))
                        await response.prepare(request)
                        async for chunk in answer.content.iter_any():
                            await response.write(chunk)
                        await response.write_eof()
                        return response
            except _NO_ANSWER as error:
                if response.prepared:  # a part has been passed on: the caller must see that it ends too early
                    if request.transport is not None:
                        request.transport.close()
                    return response
                self._note_failure(worker, error)
        raise NoWorkers(f"none of {len(tried)} engines answers" if tried else "no engine is registered")

    def _next(self, session: str | None, tried: list[Worker]) -> Worker | None:
        """The next engine to try, noted in `tried`."""
        worker = None if len(tried) == MAX_TRIES else self.pool.choose(session, tried)
        if worker is not None:
            self.retries += bool(tried)
            tried.append(worker)
        return worker

    async def _ask_one(
        self, worker: Worker, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> Answer:
        with _counted(worker):
            async with self._request(worker, method, path, body, headers) as answer:
                return Answer(answer.status, answer.headers, await answer.read())

    def _request(self, worker: Worker, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Any:
        assert self._client is not None
        return self._client.request(method, f"{worker.url}{path}", data=body, headers=_kept(headers))

    def _note_failure(self, worker: Worker, error: Exception) -> None:
        self.pool.avoid(worker)
        logger.warning("engine %s does not answer: %s: %s", worker.url, type(error).__name__, error)


@contextmanager
def _counted(worker: Worker) -> Iterator[None]:
    """The worker has one request more for the length of a block."""
    worker.load += 1
    worker.served += 1
    try:
        yield
    finally:
        worker.load -= 1


def _kept(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in _HOP_HEADERS}
