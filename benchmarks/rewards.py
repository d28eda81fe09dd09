"""Gradings per second through the pool of grader processes, and how long the worst single answer may take.

    python benchmarks/rewards.py --timeout 2

Prints one JSON line per case. `plain` are short answers behind 1,000-token responses, half of them right: the target
is 2,000 a second on two cores. `symbolic` need sympy. Each line of `hostile` is one answer that was made to hurt;
`seconds` must stay under the limit and `event_loop_gap_s` (the longest time that the loop stood still) small.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import time
from argparse import Namespace
from typing import Any

from slime.rollout.rm_hub import FAILURE_KEY, async_rm, start_graders
from slime.rollout.rm_hub.grader_pool import close_grader_pool, grader_pool
from slime.utils.types import Sample

FILLER = "We add the two numbers and look at what is left of the sum, step by step. "
SYMBOLIC = [(r"\sqrt{8}", r"2\sqrt{2}"), ("x^2-1", "(x-1)(x+1)"), (r"\frac{\pi}{2}", r"\pi/2"), ("2^{10}", "1024")]
HOSTILE = {
    "tower": "9**9**9**9",
    "hidden tower": "((((9^99)^99)^99)^99)^99+x",
    "factorials": "(999!)!+x",
    "import": "__import__('os').system('sleep 60')",
    "deep nesting": "(" * 5000 + "1" + ")" * 5000,
    "nested fractions": r"\frac{" * 5000 + "1" + "}{2}" * 5000,
    "1 MB of braces": "{" * 500_000 + "}" * 500_000,
    "1 MB of open braces": "{" * 1_000_000,
    "1 MB of digits": "9" * 1_000_000,
    "100,000 boxes": r"\boxed{" * 100_000,
    "tuple of 100,000": "(" + "1," * 100_000 + "1)",
    "unicode digits": "٣" * 1000,
    "nul": "\0" * 1000,
}


def plain_samples(number: int, characters: int, seed: int = 0) -> list[Sample]:
    """Short whole numbers, fractions and decimals in boxes; every second one wrong."""
    draw = random.Random(seed)
    filler = (FILLER * (characters // len(FILLER) + 1))[:characters]
    samples = []
    for index in range(number):
        value = draw.randint(-9999, 9999)
        answer = draw.choice([f"{value}", rf"\frac{{{value}}}{{7}}", f"{value}.5"])
        label = answer if index % 2 else answer.replace(str(value), str(value + 1))
        samples.append(Sample(index=index, response=rf"{filler} \boxed{{{answer}}}.", label=label))
    return samples


async def grade_all(args: Namespace, samples: list[Sample], concurrency: int) -> tuple[float, list[float]]:
    """(seconds, rewards) with at most `concurrency` gradings at a time."""
    slots = asyncio.Semaphore(concurrency)

    async def one(sample: Sample) -> float:
        async with slots:
            return await async_rm(args, sample)

    started = time.perf_counter()
    rewards = await asyncio.gather(*(one(sample) for sample in samples))
    return time.perf_counter() - started, list(rewards)


def rate(args: Namespace, name: str, samples: list[Sample], concurrency: int) -> None:
    asyncio.run(grade_all(args, samples[:64], concurrency))  # imports are not measured
    cpu = time.process_time()
    seconds, rewards = asyncio.run(grade_all(args, samples, concurrency))
    _print(
        case=name,
        gradings=len(samples),
        per_second=round(len(samples) / seconds),
        own_cpu_us=round((time.process_time() - cpu) / len(samples) * 1e6),
        mean_reward=round(sum(rewards) / len(rewards), 3),
        failures=sum(FAILURE_KEY in sample.metadata for sample in samples),
    )


def hostile(args: Namespace, rm_type: str, name: str, answer: str) -> None:
    """One answer that was made to hurt, while a ticker watches the event loop."""
    sample = Sample(index=0, response=rf"\boxed{{{answer}}}", label="x+1", metadata={"rm_type": rm_type})

    async def watched() -> tuple[float, float]:
        gap, last = 0.0, time.perf_counter()

        async def tick() -> None:
            nonlocal gap, last
            while True:
                await asyncio.sleep(0.01)
                gap, last = max(gap, time.perf_counter() - last - 0.01), time.perf_counter()

        ticking = asyncio.create_task(tick())
        seconds, _ = await grade_all(args, [sample], 1)
        ticking.cancel()
        return seconds, gap

    seconds, gap = asyncio.run(watched())
    failure = sample.metadata.get(FAILURE_KEY)
    _print(
        case=f"hostile: {name} ({rm_type})",
        seconds=round(seconds, 3),
        limit_s=args.rm_timeout,
        outcome=failure or "graded",
        event_loop_gap_s=round(gap, 3),
    )


def _print(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=20_000)
    parser.add_argument("--characters", type=int, default=4000, help="per response; 4,000 are about 1,000 tokens")
    parser.add_argument("--concurrency", type=int, default=512)
    parser.add_argument("--timeout", type=float, default=2.0, help="--rm-timeout")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # what fails stands in the lines
    args = Namespace(rm_type="math", rm_timeout=options.timeout, custom_rm_path=None, hf_checkpoint=None)
    start_graders(args)
    _print(cores=os.cpu_count(), workers=grader_pool().num_workers)
    rate(args, "plain", plain_samples(options.number, options.characters), options.concurrency)
    symbolic = [Sample(response=rf"\boxed{{{a}}}", label=b) for a, b in SYMBOLIC] * 100
    rate(args, "symbolic", symbolic, options.concurrency)
    verified = plain_samples(1000, options.characters)
    for sample in verified:
        sample.metadata["rm_type"] = "math_verify"
    rate(args, "math_verify", verified, options.concurrency)
    for rm_type in ("math", "math_verify"):
        for name, answer in HOSTILE.items():
            hostile(args, rm_type, name, answer)
    close_grader_pool()


if __name__ == "__main__":
    main()
