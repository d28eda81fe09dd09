"""An engine that costs almost nothing: a bare HTTP server that answers every /generate with prepared bytes.

    python benchmarks/free_engine.py --tokens 1024 [--delay-per-token 0.0001 --lengths 64,2048]

Prints its port, then serves until its stdin ends. With a delay an answer takes as long as its number of tokens says;
its length is drawn from a Pareto distribution between the bounds by the request's sampling seed, /abort_request
cuts it, and an input that goes on from a cut answer gets the rest.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from typing import Any

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


def answer(tokens: int, finish: str = "stop") -> bytes:
    """Body of an engine's answer with this many tokens."""
    meta = {
        "id": "0" * 32,
        "finish_reason": {"type": finish},
        "prompt_tokens": 64,
        "completion_tokens": tokens,
        "cached_tokens": 0,
        "weight_version": "1",
        "output_token_logprobs": [[-0.6931471824645996 - i / 1e4, 1000 + i, None] for i in range(tokens)],
    }
    return json.dumps({"text": "word " * tokens, "meta_info": meta}).encode()


class Engine:
    """What the connections of one server share."""

    def __init__(self, tokens: int, delay: float, prompt_tokens: int, shortest: int, longest: int) -> None:
        self.fixed = answer(tokens)
        self.delay, self.shortest, self.longest = delay, shortest, longest
        self.prompt_tokens = prompt_tokens
        self.aborted = asyncio.Event()

    def length(self, seed: int) -> int:
        """The seed's length. A heavy tail: half of the answers are shorter than twice the shortest."""
        return min(self.longest, int(self.shortest * random.Random(seed).paretovariate(1.0)))

    async def generate(self, body: bytes) -> bytes:
        """The answer to one request, after the time that it takes."""
        if not self.delay:
            return self.fixed
        request = json.loads(body)
        done = len(request["input_ids"]) - self.prompt_tokens
        wanted = max(1, self.length(request["sampling_params"]["sampling_seed"]) - done)
        began, aborted = time.monotonic(), self.aborted
        try:
            await asyncio.wait_for(aborted.wait(), wanted * self.delay)
        except TimeoutError:
            return answer(wanted)
        return answer(min(wanted, int((time.monotonic() - began) / self.delay)), "abort")

    def abort(self) -> bytes:
        """End the answers that are on their way."""
        self.aborted.set()
        self.aborted = asyncio.Event()
        return b"{}"


async def serve(engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One connection, request after request."""
    info = json.dumps({"model_path": "m", "is_generation": True, "weight_version": "1"}).encode()
    while True:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()
            return
        sizes = [line[15:] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        length = int(sizes[0]) if sizes else 0
        body = await reader.readexactly(length) if length else b""
        words = head.split(b" ", 2)
        if len(words) < 3:  # the router asks whether HTTP/2 is spoken
            writer.close()
            return
        path = words[1]
        if path == b"/generate":
            content = await engine.generate(body)
        else:
            content = engine.abort() if path == b"/abort_request" else info
        writer.write(HEAD % len(content) + content)


async def run(options: Any) -> None:
    engine = Engine(
        options.tokens, options.delay_per_token, options.prompt_tokens, *map(int, options.lengths.split(","))
    )
    server = await asyncio.start_server(lambda r, w: serve(engine, r, w), "127.0.0.1", 0, limit=2**22)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--delay-per-token", type=float, default=0.0, help="seconds")
    parser.add_argument("--prompt-tokens", type=int, default=0, help="with a delay: what of the input is no answer")
    parser.add_argument("--lengths", default="64,2048", help="shortest and longest answer, with a delay")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
