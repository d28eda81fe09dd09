"""A teacher behind an HTTP server: what is asked, and what its answer becomes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web
from test_http_utils import serve

from slime.ray.train_data import convert_samples_to_train_data
from slime.rollout.on_policy_distillation import post_process_rewards, reward_func
from slime.utils.types import Sample
from tests.support.rollout_args import rollout_args

PATH = "slime.rollout.on_policy_distillation"


def make_sample() -> Sample:
    return Sample(
        index=0, group_index=0, tokens=[3, 1, 4, 1, 5], response_length=2, status=Sample.Status.COMPLETED,
        rollout_log_probs=[-1.0, -2.0],
    )  # fmt: skip


def answer_for(tokens: list[int]) -> dict[str, Any]:
    entries = [[None if i == 0 else -0.25 * i, token, None] for i, token in enumerate(tokens)]
    return {"meta_info": {"input_token_logprobs": entries}}


def ask(sample: Sample, answer: dict[str, Any] | None = None, **settings: Any) -> tuple[float, dict[str, Any]]:
    """(the reward, the body that the teacher got)"""
    bodies = []

    async def teacher(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        return web.json_response(answer or answer_for(bodies[-1]["input_ids"]))

    async def run() -> float:
        async with serve(teacher) as url:
            return await reward_func(rollout_args(rm_url=f"{url}/generate", **settings), sample)

    return asyncio.run(run()), bodies[0]


def test_the_teacher_is_asked_at_the_students_temperature() -> None:
    """R11: T = .7, the request carries .7; the ids are sent as they were sampled."""
    sample = make_sample()
    reward, body = ask(sample, rollout_temperature=0.7)
    assert reward == 0.0 and sample.teacher_log_probs == [-0.75, -1.0]
    assert body["sampling_params"] == {"temperature": 0.7, "max_new_tokens": 0, "skip_special_tokens": False}
    assert (body["input_ids"], body["return_logprob"], body["logprob_start_len"]) == ([3, 1, 4, 1, 5], True, 0)


def test_an_answer_for_other_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="not the sample's 5"):
        ask(make_sample(), answer_for([3, 1, 4, 1]))
    whole = make_sample()
    whole.response_length = 5
    with pytest.raises(ValueError, match="no log-prob for token 0 of the response"):
        ask(whole)


def test_rewards_are_zero_and_log_probs_reach_the_train_data() -> None:
    sample = make_sample()
    sample.reward, _ = ask(sample)
    raw = make_sample()
    raw.reward = answer_for(raw.tokens)  # a reward function that returns the teacher's answer as it came
    args = rollout_args(
        custom_rm_path=f"{PATH}.reward_func", custom_reward_post_process_path=f"{PATH}.post_process_rewards"
    )
    data = convert_samples_to_train_data(args, [sample, raw])
    assert data["rewards"] == [0.0, 0.0] and data["teacher_log_probs"] == [[-0.75, -1.0]] * 2
    with pytest.raises(ValueError, match="has no teacher log-probs"):
        post_process_rewards(args, [make_sample()])
