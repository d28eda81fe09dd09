"""A real HTTP server that answers as router and engine at once, with answers that the test makes up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from aiohttp import web

Answer = dict[str, Any]


def answer(ids: list[int], text: str = "", finish: str = "stop", version: str = "3", log_prob: float = -0.5) -> Answer:
    """What an engine replies for the tokens `ids`."""
    meta = {
        "id": "r",
        "finish_reason": {"type": finish},
        "prompt_tokens": 4,
        "completion_tokens": len(ids),
        "cached_tokens": 1,
        "weight_version": version,
        "output_token_logprobs": [[log_prob, token, None] for token in ids],
    }
    return {"text": text, "output_ids": ids, "meta_info": meta}


class FakeEngine:
    """Serves POST /generate with `reply(payload)`; `hold=True` keeps answers back until /abort_request.

    Attributes:
        requests: the bodies of /generate, in order.
        aborts: how many times /abort_request was called.
        incremental: streams send each token once.
        breaks_after: streams end before this token, as when an engine dies.
    """

    def __init__(self, reply: Callable[[dict[str, Any]], Answer]) -> None:
        self.reply = reply
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.aborts = 0
        self.hold: Callable[[dict[str, Any]], bool] = lambda payload: False
        self.partial: list[int] = []
        self.workers: list[str] | None = None
        self.port = 0
        self.version = "3"
        self.incremental = False
        self.breaks_after: int | None = None

    async def __aenter__(self) -> FakeEngine:
        self._aborted = asyncio.Event()
        app = web.Application()
        app.add_routes(
            [
                web.post("/generate", self._generate),
                web.post("/abort_request", self._abort),
                web.get("/workers", self._workers),
                web.get("/model_info", self._model_info),
            ]
        )
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        payload = await request.json()
        self.requests.append(payload)
        self.headers.append(dict(request.headers))
        if self.hold(payload):
            await self._aborted.wait()
            return web.json_response(answer(self.partial, "p" * len(self.partial), "abort"))
        if payload.get("stream"):
            return await self._stream(request, self.reply(payload))
        return web.json_response(self.reply(payload))

    async def _stream(self, request: web.Request, whole: Answer) -> web.StreamResponse:
        """An event per token, with all tokens so far or (`incremental`) the new one alone."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        entries = whole["meta_info"]["output_token_logprobs"]
        for count in range(1, len(entries) + 1):
            if count == self.breaks_after:
                assert request.transport is not None
                request.transport.close()
                return response
            last = count == len(entries)
            meta = {
                **whole["meta_info"],
                "finish_reason": whole["meta_info"]["finish_reason"] if last else None,
                "completion_tokens": count,
                "output_token_logprobs": entries[count - 1 if self.incremental else 0 : count],
                "output_token_logprobs_length": count,
            }
            await response.write(b"data: " + json.dumps({"text": "", "meta_info": meta}).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _abort(self, request: web.Request) -> web.Response:
        self.aborts += 1
        self._aborted.set()
        return web.json_response({})

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version})

    async def _workers(self, request: web.Request) -> web.Response:
        urls = self.workers if self.workers is not None else [f"http://127.0.0.1:{self.port}"]
        return web.json_response({"workers": [{"url": url} for url in urls]})
