"""What the rollout path costs: samples/s and CPU per sample, against the bare router under plain load.

    python benchmarks/rollout_overhead.py --samples 4096 --tokens 1024

Engines are `free_engine.py` (they cost almost nothing), the router is the real one. Prints for the bare load (many
connections that post the same bytes and read the answers, as wrk does) and for `generate_rollout_async`: samples per
second, and milliseconds of this process's CPU per sample. Then, with engines that take time per token and heavy-tailed
lengths, samples/s with --partial-rollout against waiting for the longest of each batch (`--skip-partial` leaves it
out).
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import pstats
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.ray.router import Router, register_worker, start_router
from slime.rollout import sglang_rollout
from slime.utils.garbage import collect_rarely
from slime.utils.http_utils import close_client
from slime.utils.misc import SingletonMeta
from slime.utils.types import Sample
from tests.support.rollout_args import rollout_args
from tests.support.toy_tokenizer import byte_tokenizer

ROLLOUTS = 16
PROMPT = "What is the sum of the first hundred numbers, and how do you know?"


@contextmanager
def serving(folder: str, engines: int, *flags: str) -> Iterator[Router]:
    """The router in front of engines, each a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve().with_name("free_engine.py")), *flags]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(engines)
    ]
    router = start_router(
        Namespace(
            log_dir=folder, sglang_router_ip=None, sglang_router_port=None, sglang_router_request_timeout_secs=600,
            router_log_level="warn",
        )
    )  # fmt: skip
    try:
        urls = [f"http://127.0.0.1:{int(process.stdout.readline())}" for process in processes]  # type: ignore[union-attr]
        for url in urls:
            register_worker(router.url, {"url": url, "worker_type": "regular"})
        router.wait_workers(urls, 60)
        yield router
    finally:
        router.stop()
        for process in processes:
            process.kill()
            process.wait()


async def bare_load(router: Router, requests: int, connections: int) -> None:
    """Post the same bytes over and over, and read the answers without looking at them."""
    ids = byte_tokenizer().encode(PROMPT, add_special_tokens=False)
    request = {"input_ids": ids, "sampling_params": {"max_new_tokens": 2048}, "return_logprob": True}
    body = json.dumps(request).encode()
    fields = ("POST /generate HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(body)}")
    head = "\r\n".join([*fields, "", ""])
    left = iter(range(requests))

    async def connection() -> None:
        reader, writer = await asyncio.open_connection(router.ip, router.port, limit=2**22)
        for _ in left:
            writer.write(head.encode() + body)
            answer = (await reader.readuntil(b"\r\n\r\n")).lower()
            await reader.readexactly(int(answer.split(b"content-length:")[1].split(b"\r\n")[0]))
        writer.close()

    await asyncio.gather(*(connection() for _ in range(connections)))


class Prompts:
    """Groups without end."""

    def __init__(self, n_samples: int) -> None:
        self.n_samples, self.given = n_samples, 0
        self.back: list[list[Sample]] = []

    def get_samples(self, number: int) -> list[list[Sample]]:
        taken, self.back = self.back[:number], self.back[number:]
        return [*taken, *(self._group() for _ in range(number - len(taken)))]

    def _group(self) -> list[Sample]:
        self.given += 1
        first = self.given * self.n_samples
        return [Sample(prompt=PROMPT, group_index=self.given, index=first + i) for i in range(self.n_samples)]


async def no_reward(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    return 0.0


def make_args(folder: str, router: Router, **given: Any) -> Namespace:
    settings = {"custom_rm_path": "benchmarks.rollout_overhead.no_reward", "rollout_max_response_len": 2048, **given}
    args = rollout_args(hf_checkpoint=folder, vocab_size=200_000, sglang_server_concurrency=256, **settings)
    args.sglang_router_ip, args.sglang_router_port = router.ip, router.port
    args.over_sampling_batch_size = given.get("over_sampling_batch_size", args.rollout_batch_size)
    SingletonMeta.clear_instances(sglang_rollout.GenerateState)
    return args


async def rollouts(args: Namespace, count: int) -> int:
    """Roll out `count` times; the number of samples in the batches."""
    prompts, done = Prompts(args.n_samples_per_prompt), 0
    for rollout_id in range(count):
        output, returned = await sglang_rollout.generate_rollout_async(args, rollout_id, prompts)
        prompts.back += returned
        done += sum(len(group) for group in output.samples)
    await close_client()
    return done


def report(name: str, began: float, cpu: float, count: int) -> float:
    """Print a line; samples per second."""
    wall, busy = time.monotonic() - began, time.process_time() - cpu
    print(
        f"{name}: {count / wall:.0f} samples/s, {1e3 * busy / count:.2f} ms CPU per sample in this process", flush=True
    )
    return count / wall


def overhead(folder: str, options: argparse.Namespace) -> None:
    with serving(folder, 1, "--tokens", str(options.tokens)) as router:
        asyncio.run(bare_load(router, 256, 64))
        began, cpu = time.monotonic(), time.process_time()
        asyncio.run(bare_load(router, options.samples, 64))
        report("bare router", began, cpu, options.samples)
        args = make_args(folder, router, rollout_batch_size=64, n_samples_per_prompt=8)
        asyncio.run(rollouts(args, 1))  # warm
        args = make_args(folder, router, rollout_batch_size=64, n_samples_per_prompt=8)
        profile = cProfile.Profile() if options.profile else None
        began, cpu = time.monotonic(), time.process_time()
        if profile is not None:
            profile.enable()
        done = asyncio.run(rollouts(args, max(1, options.samples // 512)))
        if profile is not None:
            profile.disable()
        report("rollout function", began, cpu, done)
        if profile is not None:
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)


def partial(folder: str) -> None:
    flags = ("--delay-per-token", "0.001", "--lengths", "64,2048", "--prompt-tokens", str(len(PROMPT)))
    rates = {}
    for name, kept in (("waiting for the longest", False), ("partial rollout", True)):
        with serving(folder, 1, *flags) as router:
            args = make_args(
                folder, router, rollout_batch_size=32, n_samples_per_prompt=4, partial_rollout=kept,
                over_sampling_batch_size=64 if kept else 32, sglang_enable_deterministic_inference=True,
            )  # fmt: skip
            began, cpu = time.monotonic(), time.process_time()
            rates[name] = report(name, began, cpu, asyncio.run(rollouts(args, ROLLOUTS)))
    print(f"partial rollout / waiting: {rates['partial rollout'] / rates['waiting for the longest']:.2f} x samples/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--profile", action="store_true", help="also print where the rollout function's time goes")
    parser.add_argument("--skip-partial", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        byte_tokenizer().save_pretrained(folder)
        collect_rarely()  # as the rollout manager does
        overhead(folder, options)
        if not options.skip_partial:
            partial(folder)


if __name__ == "__main__":
    main()
