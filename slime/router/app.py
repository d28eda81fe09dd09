"""The router's HTTP application: the workers as sglang-router has them, /generate, sessions, and everything else."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import orjson
from aiohttp import web

from slime.router.proxy import Proxy
from slime.router.sessions import Session, SessionStore, Trajectory
from slime.router.workers import WorkerPool

logger = logging.getLogger(__name__)

SESSION_HEADER = "X-SMG-Routing-Key"
MAX_BODY_BYTES = 1 << 30
FORGET_SECONDS = 300.0
# How an answer is asked for whose text must be whole, for the next turn begins with it.
_WHOLE_TEXT = {"no_stop_trim": True, "skip_special_tokens": False, "spaces_between_special_tokens": False}

Middleware = Callable[..., Any]


class RouterApp:
    """The handlers.

    Args:
        load_tokenizer: loads the model's tokenizer, when the first request by text comes.
        timeout: seconds for a request.
    """

    def __init__(self, load_tokenizer: Callable[[], Any], timeout: float) -> None:
        self.pool = WorkerPool()
        self.proxy = Proxy(self.pool, timeout)
        self._load_tokenizer = load_tokenizer
        self._tokenizer: Any = None
        self._store: SessionStore | None = None
        self._loading = asyncio.Lock()

    def application(self, middlewares: Sequence[Middleware] = ()) -> web.Application:
        """Everything put together; a middleware is `async (request, handler) -> response`."""
        app = web.Application(
            client_max_size=MAX_BODY_BYTES, middlewares=[web.middleware(function) for function in middlewares]
        )
        app.add_routes(
            [
                web.get("/workers", self.list_workers),
                web.post("/workers", self.add_worker),
                web.get("/workers/{id}", self.get_worker),
                web.delete("/workers/{id}", self.delete_worker),
                web.get("/liveness", self.live),
                web.get("/health", self.ready),
                web.get("/readiness", self.ready),
                web.post("/generate", self.generate),
                web.post("/retrieve_from_text", self.retrieve_from_text),
                web.get("/sessions/{name}", self.get_session),
                web.delete("/sessions/{name}", self.delete_session),
                web.route("*", "/{path:.*}", self.forward),
            ]
        )
        app.cleanup_ctx.append(self._lifetime)
        return app

    async def _lifetime(self, app: web.Application) -> Any:
        await self.proxy.start()
        forgetting = asyncio.create_task(self._forget_idle())
        yield
        forgetting.cancel()
        with suppress(asyncio.CancelledError):
            await forgetting
        await self.proxy.close()

    async def _forget_idle(self) -> None:
        while True:
            await asyncio.sleep(FORGET_SECONDS)
            if self._store is not None and (count := self._store.forget_idle()):
                logger.warning("%d sessions were idle for hours and are forgotten", count)

    # -- workers ------------------------------------------------------------------------------------------------------

    async def list_workers(self, request: web.Request) -> web.Response:
        workers = [worker.facts() for worker in self.pool.workers]
        sessions = 0 if self._store is None else len(self._store)
        return web.json_response(
            {"workers": workers, "total": len(workers), "sessions": sessions, "retries": self.proxy.retries}
        )

    async def add_worker(self, request: web.Request) -> web.Response:
        body = await _json(request)
        url, kind = body.get("url"), body.get("worker_type", "regular")
        if not isinstance(url, str) or not url.startswith("http://"):
            raise _refusal(f"url must be http://host:port, not {url!r}")
        if kind != "regular":
            raise _refusal(f"this router has regular workers only, not {kind!r}")
        worker = self.pool.add(url.rstrip("/"), kind)
        return web.json_response({"status": "accepted", "worker_id": worker.id, "url": worker.url}, status=202)

    async def get_worker(self, request: web.Request) -> web.Response:
        worker = self.pool.find(request.match_info["id"])
        if worker is None:
            raise web.HTTPNotFound(text="no such worker")
        return web.json_response(worker.facts())

    async def delete_worker(self, request: web.Request) -> web.Response:
        if not self.pool.remove(request.match_info["id"]):
            raise web.HTTPNotFound(text="no such worker")
        return web.json_response({"status": "accepted"}, status=202)

    async def live(self, request: web.Request) -> web.Response:
        return web.Response(text="OK")

    async def ready(self, request: web.Request) -> web.Response:
        healthy = any(worker.is_healthy for worker in self.pool.workers)
        return web.Response(text="OK") if healthy else web.Response(status=503, text="no healthy worker")

    # -- generation ---------------------------------------------------------------------------------------------------

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Token ids go to an engine as they are. A text, or messages, of a session get the session's tokens."""
        body = await request.read()
        session = request.headers.get(SESSION_HEADER)
        if session and (b'"text"' in body or b'"messages"' in body):
            content = _parsed(body)
            if "input_ids" not in content and ("text" in content or "messages" in content):
                return await self._generate_by_text(request, session, content)
        if b'"stream"' in body and _parsed(body).get("stream"):
            return await self.proxy.stream(request, body, session)
        return (await self.proxy.ask("POST", request.path_qs, body, request.headers, session)).response()

    async def _generate_by_text(self, request: web.Request, name: str, content: dict[str, Any]) -> web.Response:
        store = await self._sessions()
        if content.get("stream"):
            raise _refusal("requests by text of a session can't be streamed: their tokens are kept when they end")
        if content.get("image_data") or isinstance(content.get("text"), list):
            raise _refusal("requests by text of a session have one text and no images")
        text = self._rendered(content)
        if (sampling := content.get("sampling_params") or {}).get("n", 1) != 1:
            raise _refusal("requests by text of a session have one answer (n)")
        session = store.session(name)
        prompt, reused = store.tokenised(session, text)
        payload = {key: value for key, value in content.items() if key not in ("text", "messages", "tools")}
        payload |= {
            "input_ids": prompt.tokens,
            "return_logprob": True,
            "sampling_params": {**sampling, **_WHOLE_TEXT},
        }
        answer = await self.proxy.ask("POST", request.path_qs, orjson.dumps(payload), request.headers, name)
        if not answer.is_success:
            return answer.response()
        output = _parsed(answer.body)
        whole = _answered(prompt, output)
        shown = store.shown(whole)
        session.add(whole, shown)
        if sampling.get("skip_special_tokens", True):
            output["text"] = shown.text[len(prompt.text) :]
        output["session"] = {"prompt_tokens_reused": reused, "prompt_tokens_new": len(prompt.tokens) - reused}
        return answer.response(orjson.dumps(output))

    def _rendered(self, content: dict[str, Any]) -> str:
        if "messages" not in content:
            return content["text"]
        if self._tokenizer.chat_template is None:
            raise _refusal("the model's tokenizer has no chat template: send a text")
        return self._tokenizer.apply_chat_template(
            content["messages"], tools=content.get("tools"), tokenize=False, add_generation_prompt=True
        )

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """Whatever else an engine offers, from any of them."""
        return await self.proxy.stream(request, await request.read(), request.headers.get(SESSION_HEADER))

    # -- sessions -----------------------------------------------------------------------------------------------------

    async def retrieve_from_text(self, request: web.Request) -> web.Response:
        """{session_id, text} → the text's tokens, loss mask and log-probs (`Trajectory`). What is behind the last
        answer is encoded, with loss mask 0."""
        content = await _json(request)
        name, text = content.get("session_id") or request.headers.get(SESSION_HEADER), content.get("text")
        if not isinstance(name, str) or not isinstance(text, str):
            raise _refusal("session_id and text are needed, both texts")
        session = self._existing(name)
        trajectory, known = (await self._sessions()).tokenised(session, text)
        if not known:
            raise web.HTTPNotFound(text="the session has no answer whose text this one begins with")
        return web.json_response(trajectory.to_dict(), dumps=_dumps)

    async def get_session(self, request: web.Request) -> web.Response:
        """The session's trajectories, one per path that its client has taken."""
        session = self._existing(request.match_info["name"])
        return web.json_response({"trajectories": [leaf.to_dict() for leaf in session.leaves]}, dumps=_dumps)

    async def delete_session(self, request: web.Request) -> web.Response:
        self._existing(request.match_info["name"])
        (await self._sessions()).drop(request.match_info["name"])
        return web.json_response({})

    def _existing(self, name: str) -> Session:
        session = None if self._store is None else self._store.get(name)
        if session is None:
            raise web.HTTPNotFound(
                text=f"no session {name!r} is known (it may have been idle, or the router restarted)"
            )
        return session

    async def _sessions(self) -> SessionStore:
        async with self._loading:
            if self._store is None:
                self._tokenizer = await asyncio.to_thread(self._load_tokenizer)
                self._store = SessionStore(self._tokenizer)
        return self._store


def _answered(prompt: Trajectory, output: dict[str, Any]) -> Trajectory:
    meta = output["meta_info"]
    entries = meta.get("output_token_logprobs") or []
    return prompt.answered(
        output.get("text", ""),
        [entry[1] for entry in entries],
        [entry[0] for entry in entries],
        str(meta.get("weight_version", "")),
    )


async def _json(request: web.Request) -> dict[str, Any]:
    return _parsed(await request.read())


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        content = json.loads(body)  # also NaN, which orjson refuses
    except ValueError as error:
        raise _refusal(f"the body is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise _refusal("the body must be a JSON object")
    return content


def _refusal(message: str) -> web.HTTPBadRequest:
    return web.HTTPBadRequest(text=json.dumps({"error": message}), content_type="application/json")


def _dumps(content: Any) -> str:
    return orjson.dumps(content).decode()
