"""Rollouts per second of the drivers where generating a rollout takes as long as training on it.

    python -m benchmarks.async_overlap

Driver, Ray, rollout manager, data source, router and a tiny Megatron trainer are real. Generation and training are
sleeps, so that the figures are the drivers' and not those of a busy machine: a stand-in for the engine answers each
sample after a set delay, and a hook delays each training step. Sending weights is not part of it (there is no engine).

Two loads, with the same delays for all drivers:

- equal: all samples take --seconds;
- heavy tail: log-normal delays; training takes as long as a batch's slowest sample does on average.

Counted from the end of the first training step to the end of the last: what a long run does. Bounds, in multiples of
the synchronous driver's rate: asynchronous 1.7 with equal delays, fully asynchronous 1.8 with a heavy tail.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from slime.utils.types import Sample

BATCH, ANSWERS = 4, 4
STAMPS = "trained.txt"
SIGMA = 0.7  # of the logarithm of a heavy-tailed delay
FULLY_ASYNC = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
RUNS = [
    ("equal", "synchronous", "train", None),
    ("equal", "asynchronous", "train_async", None),
    ("heavy tail", "synchronous", "train", None),
    ("heavy tail", "asynchronous", "train_async", None),
    ("heavy tail", "fully asynchronous", "train_async", FULLY_ASYNC),
]
BOUNDS = {("equal", "asynchronous"): 1.7, ("heavy tail", "fully asynchronous"): 1.8}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0, help="of generating, and of training on, a rollout")
    parser.add_argument("--rollouts", type=int, default=12)
    parser.add_argument("--model", type=Path, help="tiny Hugging Face model; unset: one is made")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or make_model(Path(folder) / "model")
        rates: dict[tuple[str, str], float] = {}
        for load, name, script, function in RUNS:
            delays = {"load": load, "seconds": options.seconds, "train_seconds": train_seconds(load, options)}
            run = Path(folder) / f"{load}-{name}".replace(" ", "-")
            rates[load, name] = run_driver(script, model, run, options.rollouts, delays, function)
            ratio = rates[load, name] / rates[load, "synchronous"]
            bound = f" (at least {BOUNDS[load, name]})" if (load, name) in BOUNDS else ""
            print(f"{load:10s} {name:18s} {rates[load, name]:.3f} rollouts/s, {ratio:.2f} x synchronous{bound}")
    if any(rates[key] < bound * rates[key[0], "synchronous"] for key, bound in BOUNDS.items()):
        sys.exit("slower than the bound")


def make_model(directory: Path) -> Path:
    subprocess.run([sys.executable, "tools/make_tiny_model.py", "--output-dir", str(directory)], check=True)
    return directory


def run_driver(
    script: str, model: Path, folder: Path, rollouts: int, delays: dict[str, Any], function: str | None
) -> float:
    """Rollouts per second."""
    folder.mkdir()
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"input": f"{i}+1=", "label": str(i + 1)}) + "\n" for i in range(64)))
    (folder / "delays.json").write_text(json.dumps(delays))
    words = f"""
        --hf-checkpoint {model} --prompt-data {prompts} --label-key label --log-dir {folder}
        --actor-num-gpus-per-node 1 --rollout-num-gpus 0 --num-rollout {rollouts}
        --rollout-batch-size {BATCH} --n-samples-per-prompt {ANSWERS} --global-batch-size {BATCH * ANSWERS}
        --rollout-max-response-len 8 --use-dynamic-batch-size --max-tokens-per-gpu 1024
        --sglang-server-concurrency {2 * BATCH * ANSWERS} --lr 1e-6 --lr-decay-style constant
        --custom-generate-function-path {__spec__.name}.answer_after_a_delay --custom-rm-path {__spec__.name}.reward
        --rollout-data-postprocess-path {__spec__.name}.train_for_a_while
    """.split()
    words += ["--rollout-function-path", function] if function else []
    subprocess.run(
        [sys.executable, f"{script}.py", *words], check=True, stdout=sys.stderr, timeout=600 + 10 * rollouts
    )
    ends = [float(line) for line in (folder / STAMPS).read_text().splitlines()]
    assert len(ends) == rollouts
    return (rollouts - 1) / (ends[-1] - ends[0])


# -- in the rollout manager and the trainer ---------------------------------------------------------------------------


async def answer_after_a_delay(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """The stand-in for an engine: eight tokens, all at once."""
    await asyncio.sleep(delay_of(sample.index or 0, delays_of(args)))
    sample.tokens = [5, 6, 7]
    sample.append_response_tokens(args, tokens=list(range(5, 13)), log_probs=[-1.0] * 8, text="answer")
    sample.status = Sample.Status.COMPLETED
    return sample


async def reward(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    return float((sample.index or 0) % 2)


def train_for_a_while(args: Namespace, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """A hook on the trainer."""
    time.sleep(delays_of(args)["train_seconds"])
    with (Path(args.log_dir) / STAMPS).open("a") as file:
        file.write(f"{time.time()}\n")


def delays_of(args: Namespace) -> dict[str, Any]:
    return json.loads((Path(args.log_dir) / "delays.json").read_text())


def delay_of(index: int, delays: dict[str, Any]) -> float:
    """Seconds of a sample; log-normal with median 1/3 of --seconds in the heavy tail."""
    if delays["load"] == "equal":
        return delays["seconds"]
    return delays["seconds"] / 3 * math.exp(SIGMA * random.Random(index).gauss(0.0, 1.0))


def train_seconds(load: str, options: argparse.Namespace) -> float:
    """As long as the slowest sample of a batch, on average over the rollouts."""
    delays = {"load": load, "seconds": options.seconds}
    size = BATCH * ANSWERS
    slowest = [max(delay_of(rollout * size + i, delays) for i in range(size)) for rollout in range(options.rollouts)]
    return sum(slowest) / len(slowest)


if __name__ == "__main__":
    main()
