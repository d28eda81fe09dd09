"""Rule rewards, each through the pool of grader processes."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from slime.rollout import rm_hub
from slime.rollout.rm_hub import async_rm, batched_async_rm, grader_metrics, warn_without_marker
from slime.rollout.rm_hub.boxed import extract_boxed_answer
from slime.rollout.rm_hub.errors import MissingResource
from slime.rollout.rm_hub.grader_pool import close_grader_pool, grader_pool
from slime.rollout.rm_hub.grader_worker import failure_verdict
from slime.rollout.rm_hub.ifbench import compute_ifbench_reward, instruction_checks
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
        pytest.param("gpqa", "The answer is (b).", "B", 1.0, id="gpqa-small"),
        pytest.param("gpqa", "The answer is a prime, so I pick B.", "B", 1.0, id="gpqa-article"),
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


HOSTILE = {
    "tower": "9**9**9",
    "nested": "(" * 3000 + "1" + ")" * 3000,
    "fractions": r"\frac{" * 2000 + "1" + "}{2}" * 2000,
    "braces": "{" * 500_000 + "}" * 500_000,
    "open-braces": "{" * 1_000_000,
    "unicode-digits": "٣" * 100,
    "nul": "5\0",
    "surrogate": "\ud800",
    "factorials": "(999!)!+x",
    "name": "__import__('os')._exit(3)",
}


@pytest.mark.parametrize("rm_type", ["math", "boxed_deepscaler", "boxed_dapo", "f1", "gpqa", "ifbench"])
def test_hostile_answers_are_wrong_and_end_in_time(rm_type: str) -> None:
    """R7: within the limit, no process lost for what a rule can decide, and the next answer is graded as ever."""
    rules = {"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": ["Answer"]}]}
    metadata = {"rm_type": rm_type, **rules}
    args = rollout_args(rm_timeout=5.0)
    samples = [
        Sample(response=rf"\boxed{{{answer}}}", label="D", metadata=dict(metadata)) for answer in HOSTILE.values()
    ]
    right = r"Answer: \boxed{D}"
    samples.append(Sample(response=right, label=right if rm_type == "f1" else "D", metadata=dict(metadata)))
    started = time.monotonic()
    rewards = asyncio.run(batched_async_rm(args, samples))
    numbers = [reward["score"] if isinstance(reward, dict) else reward for reward in rewards]
    assert max(numbers[:-1]) <= 0 and numbers[-1] == 1 and time.monotonic() - started < 30
    assert all(sample.metadata.get("grader_failure") != "timeout" for sample in samples)


def test_math_verify_is_bounded() -> None:
    """The library works long on such answers: the limit ends it."""
    deep = r"\boxed{" + "(" * 5000 + "1" + ")" * 5000 + "}"
    score("math_verify", "1", "1")  # the import
    sample = Sample(response=deep, label="1", metadata={"rm_type": "math_verify"})
    started = time.monotonic()
    assert asyncio.run(async_rm(rollout_args(rm_timeout=0.5), sample)) == 0.0
    assert time.monotonic() - started < 10 and sample.metadata["grader_failure"] in ("timeout", "error")


NO_COMMA_AND_SMALL = ("punctuation:no_comma", "change_case:english_lowercase")


def instructions(*names: str, kwargs: list[Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"instruction_id_list": list(names), "kwargs": kwargs or [{} for _ in names], **more}


@pytest.mark.parametrize(
    ("response", "metadata", "expected"),
    [
        # IFEval
        ("no commas here", instructions("punctuation:no_comma"), 1.0),
        ("one, two", instructions("punctuation:no_comma"), 0.0),
        ("<think>one, two</think>no commas", instructions("punctuation:no_comma"), 1.0),
        ("", instructions("punctuation:no_comma"), 0.0),
        ('{"a": 1}', instructions("detectable_format:json_format"), 1.0),
        # every one of them must hold; a None in kwargs is no argument
        (
            "this text is all in small letters",
            instructions("punctuation:no_comma", "change_case:english_lowercase"),
            1.0,
        ),
        ("This text has a Large letter", instructions("punctuation:no_comma", "change_case:english_lowercase"), 0.0),
        (
            "one two three",
            instructions(
                "length_constraints:number_words", kwargs=[{"num_words": 3, "relation": "at least", "n": None}]
            ),
            1.0,
        ),
        # IFBench
        (
            "nebula kaleidoscope nebula",
            instructions(
                "count:keywords_multiple",
                kwargs=[{f"keyword{i + 1}": word for i, word in enumerate(["kaleidoscope", "nebula", "a", "b", "c"])}],
            ),
            0.0,
        ),
        ("nospaces", instructions("format:no_whitespace"), 1.0),
        ("has spaces", instructions("format:no_whitespace"), 0.0),
    ],
)
def test_ifbench(response: str, metadata: dict[str, Any], expected: float) -> None:
    assert score("ifbench", response, None, **metadata) == expected
    assert score("ifbench", response, metadata) == expected


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "needs metadata with instruction_id_list"),
        (
            instructions("punctuation:no_coma"),
            "unknown instruction 'punctuation:no_coma'; did you mean",
        ),
        (instructions("punctuation:no_comma", kwargs=[{}, {}]), "2 kwargs for 1 instructions"),
        (instructions("punctuation:no_comma", kwargs=[{"x": 1}]), "doesn't take kwargs {'x': 1}"),
        (instructions("combination:repeat_prompt"), "sample 1"),
    ],
)
def test_rows_that_ifbench_cannot_score_are_a_mistake_in_the_data(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        score("ifbench", "text", None, **metadata)


def test_missing_nltk_data_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """What isn't installed is no wrong answer."""
    import nltk

    instruction_checks()
    monkeypatch.setattr(nltk.data, "path", [])
    row = instructions("ratio:stop_words", kwargs=[{"percentage": 50}])
    with pytest.raises(MissingResource, match=r"python -m nltk.downloader punkt") as caught:
        compute_ifbench_reward("The cat sat.", None, row)
    assert failure_verdict(caught.value)[0] == "unavailable"


def test_missing_checks_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "if_verifiable.ifbench.instructions_registry", None)
    with pytest.raises(MissingResource, match=r"pip install 'slime\[ifbench\]'"):
        instruction_checks.__wrapped__()


@pytest.mark.parametrize(("label", "message"), [(None, "needs a label"), (9, "label 9 is no index into the choices")])
def test_rows_that_gpqa_cannot_score_are_a_mistake_in_the_data(label: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"sample 1 .*{message}"):
        score("gpqa", "B", label)


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
    sample = Sample(response=r"\boxed{(999!)!+x}", label="x+1", metadata={"rm_type": "math"})
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
    with pytest.raises(ValueError, match=r"sample 1 .*needs metadata with source_dataset .*\(--metadata-key"):
        score("reasoning_gym", "5", "5")
    with pytest.raises(ValueError, match=r"sample 1 .*no_such_dataset"):
        score("reasoning_gym", "5", "5", source_dataset="no_such_dataset")


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


def from_remote(handle: Any, **given: Any) -> Any:
    """The reward of a sample from a server that answers with `handle`."""

    async def call() -> Any:
        app = web.Application()
        app.add_routes([web.post("/rm", handle)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        args = rollout_args(rm_type="remote_rm", rm_url=f"http://127.0.0.1:{runner.addresses[0][1]}/rm", **given)
        try:
            return await asyncio.gather(
                *(async_rm(args, Sample(index=i, prompt="p", response="r", label=3)) for i in (0, 1))
            )
        finally:
            await close_client()
            await runner.cleanup()

    return asyncio.run(call())


def test_remote_rm_sends_prompt_response_and_label() -> None:
    seen: list[Any] = []

    async def handle(request: web.Request) -> web.Response:
        seen.append(await request.json())
        return web.json_response(0.25)

    assert from_remote(handle) == [0.25, 0.25]
    assert seen == [{"prompt": "p", "response": "r", "label": 3}] * 2


def test_remote_rm_tries_again_only_what_may_come_right() -> None:
    """A busy service is asked again; one that refuses the request is named at once."""
    calls: list[int] = []

    async def busy_at_first(request: web.Request) -> web.Response:
        calls.append(1)
        return web.Response(status=503) if len(calls) <= 2 else web.json_response({"score": 1})

    async def refuses(request: web.Request) -> web.Response:
        calls.append(1)
        return web.Response(status=422, text="no such label")

    assert from_remote(busy_at_first) == [{"score": 1}] * 2 and len(calls) == 4
    calls.clear()
    with pytest.raises(RuntimeError, match=r"sample \d .*/rm: status 422: no such label"):
        from_remote(refuses)
    assert len(calls) <= 2


def test_remote_rm_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rm_hub, "REMOTE_LIMIT_S", 0.2)

    async def hangs(request: web.Request) -> web.Response:
        await asyncio.sleep(1)
        return web.json_response(1)

    with pytest.raises(RuntimeError, match=r"sample \d .*no reward.*/rm.* (in 0.3 s|no answer)"):
        from_remote(hangs, rm_timeout=0.3)
