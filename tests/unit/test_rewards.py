"""Rule rewards, each through the pool of grader processes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from slime.rollout.rm_hub import async_rm, batched_async_rm, grader_metrics, warn_without_marker
from slime.rollout.rm_hub.boxed import extract_boxed_answer
from slime.rollout.rm_hub.grader_pool import close_grader_pool, grader_pool
from slime.rollout.rm_hub.math_utils import is_correct, split_tuple
from slime.rollout.sample_checks import check_reward
from slime.utils.http_utils import close_client
from slime.utils.types import Sample
from tests.support.rollout_args import rollout_args


@pytest.fixture(autouse=True, scope="module")
def pool() -> Iterator[None]:
    yield
    close_grader_pool()


def score(rm_type: str, response: str, label: Any, **metadata: Any) -> Any:
    sample = Sample(index=1, response=response, label=label, metadata={"rm_type": rm_type, **metadata})
    reward = asyncio.run(async_rm(rollout_args(), sample))
    assert "grader_failure" not in sample.metadata
    return reward


@pytest.mark.parametrize(
    ("rm_type", "response", "label", "expected"),
    [
        pytest.param("boxed_math", r"Answer: \boxed{5}", "5", 1, id="R1-right"),
        pytest.param("boxed_math", r"Answer: \boxed{5}", "6", 0, id="R1-wrong"),
        pytest.param("boxed_math", "Answer: 5", "5", 0, id="R1-no-box"),
        pytest.param("boxed_deepscaler", r"\boxed{5}", "5", 1, id="R1-deepscaler"),
        pytest.param("deepscaler", r"\boxed{1}###Response\boxed{2}###Response\boxed{42}", "42", 1, id="R2"),
        pytest.param("deepscaler", r"<think>\boxed{1}</think>so \boxed{42}", r"\boxed{42}", 1, id="boxed-label"),
        pytest.param("deepscaler", r"</think>\boxed{42}", "", 0, id="empty-label"),
        pytest.param("math", r"\fbox{42}", "42", 1, id="R3"),
        pytest.param("deepscaler", r"so \boxed{3}", "3", 0, id="R4"),
        pytest.param("math", r"\boxed{5}", 5, 1, id="R5-int"),
        pytest.param("math", r"\boxed{5}", 5.0, 1, id="R5-float"),
        pytest.param("math", r"\boxed{0}", 0, 1, id="R6"),
        pytest.param("math", r"\boxed{1} or \boxed{\frac{1}{2}}", "0.5", 1, id="last-box"),
        pytest.param("math_verify", r"so $x = \frac{1}{2}$", "0.5", 1.0, id="math_verify"),
        pytest.param("math_verify", "so 3", r"\frac{1}{2}", 0.0, id="math_verify-wrong"),
        pytest.param("f1", "the cat sat", "a cat", 2 / 3, id="f1"),
        pytest.param("f1", "yes it is", "yes", 0.0, id="f1-closed"),
        pytest.param("gpqa", "<think>A</think>The answer is (B).", "B", 1.0, id="gpqa"),
        pytest.param("gpqa", r"\boxed{C}", 2, 1.0, id="gpqa-index"),
        pytest.param("gpqa", "I think option A", "D", 0.0, id="gpqa-wrong"),
    ],
)
def test_rules(rm_type: str, response: str, label: Any, expected: float) -> None:
    assert score(rm_type, response, label) == pytest.approx(expected)


def test_gpqa_falls_back_on_the_answer_s_text() -> None:
    choices = ["the red one", "the blue one"]
    assert score("gpqa", "clearly the blue one, as shown", "the blue one", choices=choices) == 1.0
    assert score("gpqa", "clearly the red one, as shown", "the blue one", choices=choices) == 0.0


@pytest.mark.parametrize(("rm_type", "response"), [("dapo", "so\nAnswer: $1,000$"), ("boxed_dapo", r"\boxed{1000}")])
def test_dapo(rm_type: str, response: str) -> None:
    assert score(rm_type, response, "1000.0") == {"score": 1.0, "acc": True, "pred": "1000"}
    assert score(rm_type, response, "7")["score"] == -1.0


def test_reasoning_gym() -> None:
    import reasoning_gym

    entry = reasoning_gym.create_dataset("basic_arithmetic", size=1, seed=3)[0]
    answer = entry["answer"]
    assert score("reasoning_gym", f"<think>7</think><answer>{answer}</answer>", None, **entry) == 1.0
    assert score("reasoning_gym", f" {answer}\n", None, entry=entry) == 1.0
    assert score("reasoning_gym", answer, answer, **entry["metadata"]) == 1.0
    assert score("reasoning_gym", "no idea", answer, **entry["metadata"]) < 0.5


def test_model_output_never_runs(tmp_path: Path) -> None:
    """R7"""
    target = tmp_path / "f"
    for code in (f"__import__('os').system('touch {target}')", f"exec(open('{target}','w'))", "().__class__"):
        assert score("math", rf"\boxed{{{code}}}", "5") == 0
        assert not is_correct(code, "x")
    assert not target.exists()


HUGE = r"\boxed{((((9^99)^99)^99)^99)^99+x}"


def test_a_grader_that_hangs_scores_zero_and_is_counted() -> None:
    args = rollout_args(rm_timeout=0.5, rm_type="math")
    asyncio.run(async_rm(rollout_args(rm_type="math"), Sample(response=r"\boxed{1}", label="1")))  # the import
    sample = Sample(index=1, response=HUGE, label="x+1")
    fast = [Sample(index=2 + i, response=r"\boxed{2}", label="2") for i in range(4)]

    async def grade() -> tuple[list[Any], list[float]]:
        ticks, started = [], time.monotonic()

        async def tick() -> None:
            while True:
                ticks.append(time.monotonic() - started)
                await asyncio.sleep(0.05)

        ticking = asyncio.create_task(tick())
        rewards = await batched_async_rm(args, [sample, *fast])
        ticking.cancel()
        return rewards, ticks

    started = time.monotonic()
    rewards, ticks = asyncio.run(grade())
    assert rewards == [0, 1, 1, 1, 1] and time.monotonic() - started < 10
    assert len(ticks) >= 5, "the event loop stood still while the grader hung"
    assert grader_metrics([sample, *fast]) == {"rollout/grader_timeout": 1}


def test_a_grader_that_raises_scores_lowest_and_is_counted() -> None:
    entry = {"source_dataset": "no_such_dataset", "answer": "5"}
    sample = Sample(response="x", metadata={"rm_type": "reasoning_gym", **entry})
    assert asyncio.run(async_rm(rollout_args(), sample)) == 0.0
    assert grader_metrics([sample]) == {"rollout/grader_error": 1}


def test_workers_end_with_the_pool() -> None:
    score("f1", "a", "a")
    workers = list(grader_pool()._workers)
    assert workers
    close_grader_pool()
    assert not any(worker.alive for worker in workers)


def test_no_label_is_a_mistake_in_the_data() -> None:
    with pytest.raises(ValueError, match=r"sample 1 .*has no label, rm type math needs one \(--label-key\)"):
        score("math", r"\boxed{5}", None)


def test_rows_that_reasoning_gym_cannot_score_are_a_mistake_in_the_data() -> None:
    """Not a wrong answer: a run on them would train on zeros."""
    with pytest.raises(ValueError, match=r"sample 1 .*needs metadata with source_dataset .*\(--metadata-key\)"):
        score("reasoning_gym", "5", "5")


def test_unknown_type() -> None:
    with pytest.raises(ValueError, match=r"no reward for rm type 'mth'.*'math'"):
        score("mth", "", "1")


def test_deepscaler_without_markers_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    """R4"""
    samples = [Sample(response=r"so \boxed{3}") for _ in range(3)]
    with caplog.at_level(logging.WARNING):
        warn_without_marker(rollout_args(rm_type="deepscaler"), samples)
        warn_without_marker(rollout_args(rm_type="deepscaler"), samples)
    assert caplog.text.count("none of 3 responses has </think>") == 1


@pytest.mark.parametrize("value", [1, 0.5, True])
def test_numbers_pass(value: Any) -> None:
    import numpy as np
    import torch

    sample = Sample()
    for reward in (value, np.float32(value), torch.tensor(value)):
        checked = check_reward(rollout_args(), sample, reward, None)
        assert checked == value and not hasattr(checked, "shape")


@pytest.mark.parametrize(
    ("answer", "label", "equal"),
    [
        (r"\frac12", "1/2", True),
        (r"\sqrt{8}", r"2\sqrt{2}", True),
        ("(1,2)", "(1, 2)", True),
        ("[1,2]", "(1,2)", False),
        (r"7\frac{3}{4}", "7.75", True),
        ("x=5", "5", True),
        (r"5\text{ cm}", "5", True),
        ("5cm", "5", True),
        (r"50\%", "50", True),
        ("x^2-1", "(x-1)(x+1)", True),
        (r"\frac{\pi}{2}", r"\pi/2", True),
        ("3 million", "3000000", True),
        ("12.0", "12", True),
        ("1,234", "1234", True),
        ("1+1", "2", False),
        ("2/4", "1/2", False),
        ("9^9^9^9", "5", False),
        ("5", "", False),
    ],
)
def test_equality(answer: str, label: str, equal: bool) -> None:
    assert is_correct(answer, label) is equal


def test_boxes() -> None:
    assert extract_boxed_answer(r"\boxed{a} \boxed{\frac{1}{2}} \boxed{x") == r"\frac{1}{2}"
    assert extract_boxed_answer(r"it is \boxed 7 $") == "7"
    assert extract_boxed_answer("none") is None
    assert split_tuple("(1, (2, 3))") == ["1", "(2, 3)"] and split_tuple("(a)(b)") == ["(a)(b)"]


async def in_batch(args: Any, samples: list[Sample], **kwargs: Any) -> list[float]:
    return [float(len(samples))] * (len(samples) if args.reward_key is None else 1)


async def single(args: Any, sample: Sample, **kwargs: Any) -> float:
    return -1.0


def test_batched_custom_rewards() -> None:
    args = rollout_args(custom_rm_path=f"{__name__}.in_batch")
    samples = [Sample(), Sample()]
    assert asyncio.run(batched_async_rm(args, samples)) == [2.0, 2.0]
    samples = [Sample(custom_rm_path=f"{__name__}.single") for _ in range(2)]
    assert asyncio.run(batched_async_rm(args, samples)) == [-1.0, -1.0]
    args.reward_key = "x"
    with pytest.raises(ValueError, match=r"in_batch must return a list of 2 rewards for 2 samples, got 1"):
        asyncio.run(batched_async_rm(args, [Sample(), Sample()]))


def test_remote_rm_sends_prompt_response_and_label() -> None:
    seen: list[Any] = []

    async def handle(request: web.Request) -> web.Response:
        seen.append(await request.json())
        return web.json_response(0.25)

    async def call() -> Any:
        app = web.Application()
        app.add_routes([web.post("/rm", handle)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        args = rollout_args(rm_type="remote_rm", rm_url=f"http://127.0.0.1:{runner.addresses[0][1]}/rm")
        reward = await async_rm(args, Sample(prompt="p", response="r", label=3))
        await close_client()
        await runner.cleanup()
        return reward

    assert asyncio.run(call()) == 0.25
    assert seen == [{"prompt": "p", "response": "r", "label": 3}]
