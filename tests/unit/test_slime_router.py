"""slime's own router: exact tokens over the turns of a session, engines that die, and its speed."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from examples.hooks.router import slow_requests
from slime.router.app import SESSION_HEADER, RouterApp
from slime.router.client import fill_sample
from slime.router.workers import Worker, WorkerPool
from slime.utils.http_utils import close_client
from slime.utils.types import Sample
from tests.support.fake_engine import FakeEngine, answer
from tests.support.rollout_args import rollout_args

END = 9


class PairTokenizer:
    """Encodes "ab" as one token, 3, where a model may sample it as two, 1 and 2; 9 is the end of a turn, "<e>"."""

    chat_template = "set"

    def __init__(self) -> None:
        self.vocab = {"a": 1, "b": 2, "ab": 3, "c": 4, "<e>": END, "?": 5}
        self.all_special_ids = [END]
        self.encoded: list[str] = []

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.encoded.append(text)
        ids, at = [], 0
        while at < len(text):
            piece = next(p for p in sorted(self.vocab, key=len, reverse=True) if text.startswith(p, at))
            ids.append(self.vocab[piece])
            at += len(piece)
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        words = {token: word for word, token in self.vocab.items()}
        return "".join(words[token] for token in token_ids)

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        """User turns are "?" and the text; an assistant's turn ends with the special token."""
        return "".join("?" + m["content"] if m["role"] == "user" else m["content"] + "<e>" for m in messages)


class Served:
    """A router and engines that reply with `reply(payload)`, all in one event loop."""

    def __init__(self, replies: Sequence[Callable[[dict[str, Any]], Any]], middlewares: Sequence[Any] = ()) -> None:
        self._replies = replies
        self._middlewares = middlewares
        self.tokenizer = PairTokenizer()

    async def __aenter__(self) -> Served:
        self._stack = AsyncExitStack()
        self.engines = [await self._stack.enter_async_context(FakeEngine(reply)) for reply in self._replies]
        self.router = RouterApp(lambda: self.tokenizer, timeout=30.0)
        runner = web.AppRunner(self.router.application(self._middlewares), handler_cancellation=True)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.port = runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = await self._stack.enter_async_context(aiohttp.ClientSession())
        for engine in self.engines:
            await self.call("POST", "/workers", {"url": f"http://127.0.0.1:{engine.port}", "worker_type": "regular"})
        return self

    async def __aexit__(self, *_: object) -> None:
        await close_client()
        await self._stack.aclose()

    async def call(self, method: str, path: str, body: Any = None, session: str | None = None, ok: bool = True) -> Any:
        headers = {SESSION_HEADER: session} if session else {}
        async with self.client.request(method, f"{self.url}{path}", json=body, headers=headers) as response:
            text = await response.text()
            assert (response.status < 400) == ok, text
            try:
                return json.loads(text)
            except ValueError:
                return text


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(scenario())  # type: ignore[arg-type]


def in_turn(*ids: list[int]) -> Callable[[dict[str, Any]], Any]:
    """An engine that samples these tokens, one list per request."""
    answers: Iterator[list[int]] = iter(ids)
    tokenizer = PairTokenizer()

    def reply(payload: dict[str, Any]) -> Any:
        tokens = next(answers)
        return answer(tokens, tokenizer.decode(tokens, skip_special_tokens=False), log_prob=-0.25)

    return reply


def test_three_turns_by_text_keep_the_sampled_tokens() -> None:
    """The engine samples "ab" as two tokens; the tokenizer would make one of it. Each turn begins with what was
    sampled, and the trajectory has log-probs and a loss mask of exactly that."""

    async def scenario() -> None:
        async with Served([in_turn([1, 2, END], [1, 2], [4, END])]) as served:
            text = "?ab"
            for addition in ("?c", "c?", ""):
                output = await served.call("POST", "/generate", {"text": text, "sampling_params": {}}, session="s")
                text += output["text"] + addition
            sent = [request["input_ids"] for request in served.engines[0].requests]
            assert sent == [[5, 3], [5, 3, 1, 2, 5, 4], [5, 3, 1, 2, 5, 4, 1, 2, 4, 5]]
            assert text == "?abab?cabc?c", "the end of a turn is not shown"
            assert served.tokenizer.encoded == ["?ab", "?c", "c?"], "only what is new is encoded"
            assert output["session"] == {"prompt_tokens_reused": 8, "prompt_tokens_new": 2}

            kept = await served.call("POST", "/retrieve_from_text", {"session_id": "s", "text": text})
            assert kept["tokens"] == [*sent[2], 4]
            assert kept["loss_mask"] == [0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1]
            assert kept["log_probs"] == [-0.25 * trained for trained in kept["loss_mask"]]
            assert (kept["prompt_length"], kept["weight_versions"]) == (2, ["3", "3", "3"])
            (leaf,) = (await served.call("GET", "/sessions/s"))["trajectories"]
            assert leaf["tokens"] == [*sent[2], 4, END], "as it was sampled"

            args = rollout_args(sglang_router_port=served.port)
            sample = await fill_sample(args, Sample(session_id="s", index=1), text)
            assert (sample.tokens, sample.response_length) == (kept["tokens"], 9)
            assert sample.response == "ab?cabc?c"
            assert sample.loss_mask == kept["loss_mask"][2:]
            sample.check_lengths()

    run(scenario)


def test_messages_are_rendered_and_keep_the_sampled_tokens() -> None:
    """The template writes the end of a turn that was sampled: it is not doubled."""

    async def scenario() -> None:
        async with Served([in_turn([1, 2, END], [4, END])]) as served:
            messages = [{"role": "user", "content": "ab"}]
            first = await served.call("POST", "/generate", {"messages": messages}, session="s")
            messages += [{"role": "assistant", "content": first["text"]}, {"role": "user", "content": "c"}]
            await served.call("POST", "/generate", {"messages": messages}, session="s")
            assert [r["input_ids"] for r in served.engines[0].requests] == [[5, 3], [5, 3, 1, 2, END, 5, 4]]
            asked = served.engines[0].requests[0]
            assert asked["return_logprob"] and asked["sampling_params"]["skip_special_tokens"] is False

    run(scenario)


def test_a_rewritten_history_is_another_trajectory() -> None:
    """M11: a client drops a part of the first answer. Both paths are kept, and the rewritten one trains nothing of
    the first answer: its tokens were not sampled like that."""

    async def scenario() -> None:
        async with Served([in_turn([1, 2, 4], [4])]) as served:
            await served.call("POST", "/generate", {"text": "?"}, session="s")
            await served.call("POST", "/generate", {"text": "?ab?"}, session="s")
            leaves = (await served.call("GET", "/sessions/s"))["trajectories"]
            assert [leaf["tokens"] for leaf in leaves] == [[5, 1, 2, 4], [5, 3, 5, 4]]
            assert [leaf["loss_mask"] for leaf in leaves] == [[0, 1, 1, 1], [0, 0, 0, 1]]

    run(scenario)


def test_tokens_of_a_path_and_its_fork_train_once() -> None:
    async def scenario() -> None:
        async with Served([in_turn([1, END], [2], [4])]) as served:
            for text in ("?", "?a?", "?a<e>c"):
                await served.call("POST", "/generate", {"text": text}, session="s")
            leaves = (await served.call("GET", "/sessions/s"))["trajectories"]
            assert [leaf["tokens"] for leaf in leaves] == [[5, 1, 5, 2], [5, 1, END, 4, 4]]
            assert [leaf["loss_mask"] for leaf in leaves] == [[0, 1, 0, 1], [0, 0, 1, 0, 1]]

    run(scenario)


def test_the_cost_of_a_turn_does_not_grow_with_the_history() -> None:
    """M12: 128 turns; in each, only the new text is encoded."""

    async def scenario() -> None:
        async with Served([lambda payload: answer([1, 2], "ab")]) as served:
            text = "?"
            for _ in range(128):
                output = await served.call("POST", "/generate", {"text": text}, session="s")
                text += output["text"] + "?"
            assert served.tokenizer.encoded == ["?"] * 128
            kept = await served.call("POST", "/retrieve_from_text", {"session_id": "s", "text": text})
            assert kept["tokens"] == [5, *[1, 2, 5] * 128]

    run(scenario)


def test_token_ids_pass_through_whole() -> None:
    """Unknown fields too, which sglang-router drops; nothing is kept of them."""

    async def scenario() -> None:
        async with Served([in_turn([1])]) as served:
            payload = {"input_ids": [1, 2], "return_routed_experts": True, "custom": {"x": 1}}
            output = await served.call("POST", "/generate", payload, session="s")
            assert served.engines[0].requests == [payload]
            assert output == answer([1], "a", log_prob=-0.25)
            assert (await served.call("GET", "/workers"))["sessions"] == 0

    run(scenario)


def test_streams_pass_through() -> None:
    async def scenario() -> None:
        async with Served([in_turn([1, 2])]) as served:
            text = await served.call("POST", "/generate", {"input_ids": [1], "stream": True})
            assert text.count("data: ") == 3 and text.endswith("data: [DONE]\n\n")

    run(scenario)


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ({"text": "a", "stream": True}, "can't be streamed"),
        ({"text": ["a", "b"]}, "one text"),
        ({"text": "a", "sampling_params": {"n": 2}}, "one answer"),
    ],
)
def test_what_sessions_can_not_keep_is_refused(body: dict[str, Any], part: str) -> None:
    async def scenario() -> None:
        async with Served([in_turn()]) as served:
            assert part in str(await served.call("POST", "/generate", body, session="s", ok=False))
            assert served.engines[0].requests == []

    run(scenario)


def test_unknown_sessions_and_texts_are_not_found() -> None:
    async def scenario() -> None:
        async with Served([in_turn([1])]) as served:
            retrieve = "/retrieve_from_text"
            assert "are needed" in str(await served.call("POST", retrieve, {"text": ""}, ok=False))
            assert "no session 's'" in await served.call("POST", retrieve, {"session_id": "s", "text": ""}, ok=False)
            await served.call("POST", "/generate", {"text": "?"}, session="s")
            unknown = await served.call("POST", retrieve, {"session_id": "s", "text": "c"}, ok=False)
            assert "no answer whose text" in unknown
            await served.call("DELETE", "/sessions/s")
            await served.call("GET", "/sessions/s", ok=False)

    run(scenario)


def test_a_session_stays_on_its_engine_and_moves_once_when_that_dies() -> None:
    """L18: five requests of one session over three engines go to one; a dead one costs a retry, not the request."""

    async def scenario() -> None:
        async with Served([lambda payload: answer([1], "a")] * 3) as served:
            for _ in range(5):
                await served.call("POST", "/generate", {"input_ids": [1]}, session="s")
            (kept,) = [engine for engine in served.engines if engine.requests]
            assert len(kept.requests) == 5
            await kept._runner.cleanup()
            for _ in range(5):
                await served.call("POST", "/generate", {"input_ids": [1]}, session="s")
            others = [len(engine.requests) for engine in served.engines if engine is not kept]
            assert sorted(others) == [0, 5]
            workers = await served.call("GET", "/workers")
            assert workers["retries"] == 1
            assert sorted(worker["is_healthy"] for worker in workers["workers"]) == [False, True, True]

    run(scenario)


def test_without_engines_the_answer_is_503() -> None:
    async def scenario() -> None:
        async with Served([in_turn()]) as served:
            (worker,) = (await served.call("GET", "/workers"))["workers"]
            assert (await served.call("GET", f"/workers/{worker['id']}"))["url"] == worker["url"]
            await served.call("GET", "/health")
            await served.call("DELETE", f"/workers/{worker['id']}")
            await served.call("GET", "/health", ok=False)
            error = await served.call("POST", "/generate", {"input_ids": [1]}, ok=False)
            assert error["error"]["code"] == "no_available_workers"
            await served.call("DELETE", f"/workers/{worker['id']}", ok=False)

    run(scenario)


def test_middlewares_see_every_request() -> None:
    async def scenario() -> None:
        async with (
            Served([in_turn([1])], middlewares=[slow_requests]) as served,
            served.client.post(f"{served.url}/generate", json={"input_ids": [1]}) as response,
        ):
            assert float(response.headers["X-Router-Seconds"]) < 10

    run(scenario)


def test_least_load_with_ties_in_turn() -> None:
    pool = WorkerPool()
    first, second = pool.add("http://a"), pool.add("http://b")
    first.load = 1
    assert pool.choose() is second
    second.load = second.served = 1
    assert pool.choose() is first
    pool.avoid(first)
    assert pool.choose() is second and pool.choose(tried=[second]) is first
    assert pool.add("http://a") is first and first.is_healthy
    assert pool.choose(tried=[first, second, Worker("http://c")]) is None


def test_five_hundred_small_requests_a_second() -> None:
    """Router, engine and client share one core here; the figure is printed, and a tenth of it is asked for."""

    async def scenario() -> None:
        async with Served([lambda payload: answer([1], "a")] * 2) as served:

            async def send(count: int) -> None:
                for _ in range(count):
                    async with served.client.post(f"{served.url}/generate", json={"input_ids": [1]}) as response:
                        await response.read()

            started = time.process_time()
            await asyncio.gather(*(send(25) for _ in range(16)))
            rate = 400 / (time.process_time() - started)
            print(f"{rate:.0f} requests per second of one core for router, engines and client together")
            assert rate > 50

    run(scenario)
