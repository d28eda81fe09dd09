"""The default rollout on a real SGLang server."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from slime.ray.train_data import convert_samples_to_train_data, flatten_samples
from slime.rollout import engine_abort, sglang_rollout
from slime.rollout.on_policy_distillation import fetch_teacher_log_probs
from slime.rollout.sglang_streaming_rollout import generate_streaming
from slime.utils.http_utils import close_client
from slime.utils.misc import SingletonMeta
from slime.utils.types import Sample
from tests.support.rollout_args import rollout_args

if TYPE_CHECKING:
    from tests.support.engine import SGLangServer

LONG, SHORT = 400, 4


class Prompts:
    """Numbered prompts, without end."""

    def __init__(self) -> None:
        self.given = 0

    def get_samples(self, number: int) -> list[list[Sample]]:
        first, self.given = self.given, self.given + number
        return [
            [Sample(prompt=f"question {g}: ", group_index=g, index=2 * g + i) for i in range(2)]
            for g in range(first, first + number)
        ]


@pytest.fixture
def args(sglang_server: SGLangServer) -> Iterator[Namespace]:
    from transformers import AutoConfig

    address = urlsplit(sglang_server.url)
    made = rollout_args(
        hf_checkpoint=str(sglang_server.model_dir),
        sglang_router_ip=address.hostname,
        sglang_router_port=address.port,
        vocab_size=AutoConfig.from_pretrained(sglang_server.model_dir).vocab_size,
        custom_rm_path=f"{__name__}.length_reward",
    )
    SingletonMeta.clear_instances(sglang_rollout.GenerateState)
    yield made
    SingletonMeta.clear_instances(sglang_rollout.GenerateState)


async def length_reward(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    return float(sample.response_length)


def run(coroutine: Any) -> Any:
    async def body() -> Any:
        try:
            return await coroutine
        finally:
            await close_client()

    return asyncio.run(body())


def test_a_batch_holds_what_the_engine_sampled(args: Namespace) -> None:
    """Ids as sampled, log-probs as the engine scores the same ids again, as a teacher of distillation does."""
    output, returned = run(sglang_rollout.generate_rollout_async(args, 0, Prompts()))
    samples = flatten_samples(output.samples)
    data = convert_samples_to_train_data(args, samples)
    assert returned == [] and len(samples) == 4 and {len(s.weight_versions) for s in samples} == {1}
    assert all(length <= args.rollout_max_response_len for length in data["response_lengths"])
    args.rm_url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    for sample in samples:
        assert run(fetch_teacher_log_probs(args, sample)) == pytest.approx(sample.rollout_log_probs, abs=1e-4)
    args.rollout_temperature = 0.5  # SGLang takes no notice: a notice at the start of a run and docs/losses.md say so
    assert run(fetch_teacher_log_probs(args, samples[0])) == pytest.approx(samples[0].rollout_log_probs, abs=1e-4)


async def short_then_long(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Group 0 is done at once, the others would take long; they can't stop by themselves."""
    budget = SHORT if sample.group_index == 0 else LONG
    params = {**sampling_params, "max_new_tokens": budget, "ignore_eos": True}
    return await sglang_rollout.generate(args, sample, params)


def test_partial_answers_go_on_where_they_were(args: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """L1, L2 on a real engine: tokens, log-probs and text of both parts in one sample, within one budget."""

    async def engines(args: Namespace) -> list[str]:
        return [f"http://{args.sglang_router_ip}:{args.sglang_router_port}"]

    monkeypatch.setattr(engine_abort, "worker_urls", engines)
    args.rollout_batch_size, args.over_sampling_batch_size = 1, 2
    args.partial_rollout = args.mask_offpolicy_in_partial_rollout = True
    args.custom_generate_function_path = f"{__name__}.short_then_long"
    output, returned = run(sglang_rollout.generate_rollout_async(args, 0, Prompts()))
    assert [sample.reward for sample in output.samples[0]] == [SHORT, SHORT]
    (group,) = returned
    before = [list(sample.tokens) for sample in group]
    lengths = [sample.response_length for sample in group]
    assert all(sample.status is Sample.Status.ABORTED and 0 < sample.response_length < LONG for sample in group)

    class Returned(Prompts):
        def get_samples(self, number: int) -> list[list[Sample]]:
            return returned

    args.over_sampling_batch_size = 1
    SingletonMeta.clear_instances(sglang_rollout.GenerateState)
    output, _ = run(sglang_rollout.generate_rollout_async(args, 1, Returned()))
    for sample, tokens, length in zip(output.samples[0], before, lengths, strict=True):
        assert sample.tokens[: len(tokens)] == tokens and sample.response_length == LONG == sample.reward
        assert sample.loss_mask == [0] * length + [1] * (LONG - length)
        assert sample.status is Sample.Status.TRUNCATED and sample.metadata["start_rollout_id"] == 0


async def cancelled_when_long(args: Namespace, sample: Sample, params: dict[str, Any]) -> Sample:
    """A stream that its reader leaves in the middle."""
    task = asyncio.create_task(generate_streaming(args, sample, params))
    while sample.response_length < SHORT:
        await asyncio.sleep(0.005)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return sample


def test_streams_give_what_whole_answers_give(args: Namespace) -> None:
    """Same tokens and log-probs as without streaming; what has come is on the sample when the reader leaves."""

    async def all_three() -> tuple[Sample, Sample, Sample]:
        params = sglang_rollout.GenerateState(args).sampling_params | {"temperature": 0.0, "max_new_tokens": 24}
        params["ignore_eos"] = True
        whole = await sglang_rollout.generate(args, Sample(prompt="1+1=", index=0), params)
        streamed = await generate_streaming(args, Sample(prompt="1+1=", index=1), params)
        left = await cancelled_when_long(args, Sample(prompt="1+1=", index=2), {**params, "max_new_tokens": LONG})
        return whole, streamed, left

    whole, streamed, left = run(all_three())
    assert streamed.tokens == whole.tokens and streamed.response == whole.response
    assert streamed.rollout_log_probs == pytest.approx(whole.rollout_log_probs, abs=1e-4)
    assert streamed.status is whole.status is Sample.Status.TRUNCATED and len(streamed.weight_versions) == 1
    assert left.status is Sample.Status.ABORTED and SHORT <= left.response_length < LONG
    assert left.tokens[: len(whole.tokens)] == whole.tokens[: len(left.tokens)]
    left.check_lengths()
