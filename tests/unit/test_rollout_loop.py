"""The default rollout against a real HTTP server that plays router and engine."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from slime.rollout import engine_abort, sglang_rollout, sglang_streaming_rollout
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.engine_request import retry_limits
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.rollout.partial_rollout import reset_sample
from slime.utils.http_utils import close_client
from slime.utils.misc import SingletonMeta
from slime.utils.types import Sample
from tests.support.fake_engine import FakeEngine, answer
from tests.support.rollout_args import rollout_args
from tests.support.toy_tokenizer import byte_tokenizer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("hf")
    byte_tokenizer("{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}a:").save_pretrained(path)
    return str(path)


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    SingletonMeta.clear_instances(sglang_rollout.GenerateState)
    yield
    SingletonMeta.clear_instances(sglang_rollout.GenerateState)


def ids_of(text: str) -> list[int]:
    return byte_tokenizer().encode(text, add_special_tokens=False)


def say(text: str, finish: str = "stop") -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda payload: answer(ids_of(text), text, finish)


class Prompts:
    """A data source of numbered prompts that notes what it was asked for."""

    def __init__(self, n_samples: int = 2) -> None:
        self.n_samples, self.asked, self.returned = n_samples, [], []
        self.rollout_id: int | None = None

    def get_samples(self, number: int) -> list[list[Sample]]:
        first = sum(self.asked)
        self.asked.append(number)
        return [
            [Sample(prompt=f"p{g}", group_index=g, index=g * self.n_samples + i) for i in range(self.n_samples)]
            for g in range(first, first + number)
        ]

    def add_samples(self, groups: list[list[Sample]]) -> None:
        self.returned += groups


def with_engine(args: Namespace, engine: FakeEngine, call: Callable[[], Any]) -> Any:
    async def body() -> Any:
        async with engine:
            args.sglang_router_port = engine.port
            try:
                return await call()
            finally:
                await close_client()

    return asyncio.run(body())


def roll(args: Namespace, engine: FakeEngine, source: Any, rollout_id: int = 0) -> Any:
    return with_engine(args, engine, lambda: sglang_rollout.generate_rollout_async(args, rollout_id, source))


def one(args: Namespace, engine: FakeEngine, sample: Sample, **params: Any) -> Sample:
    async def call() -> Any:
        state = sglang_rollout.GenerateState(args)
        return await sglang_rollout.generate_and_rm(args, sample, {**state.sampling_params, **params})

    return with_engine(args, engine, call)


async def by_text(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    return float(len(sample.response))


async def by_index(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    return float(sample.index % 2)


def make_args(checkpoint: str, **given: Any) -> Namespace:
    return rollout_args(hf_checkpoint=checkpoint, **{"custom_rm_path": f"{__name__}.by_text", **given})


# -- one sample ---------------------------------------------------------------------------------------------------


def test_ids_go_in_and_ids_with_log_probs_come_out(checkpoint: str) -> None:
    engine = FakeEngine(say("five", "length"))
    sample = one(make_args(checkpoint), engine, Sample(prompt="2+2=", index=0))
    (request,) = engine.requests
    assert request["input_ids"] == ids_of("2+2=") and request["return_logprob"] is True
    assert request["sampling_params"]["max_new_tokens"] == 8 and "sampling_seed" not in request["sampling_params"]
    assert sample.tokens == ids_of("2+2=five") and sample.response == "five" and sample.reward == 4.0
    assert sample.rollout_log_probs == [-0.5] * 4 and sample.loss_mask == [1] * 4
    assert sample.weight_versions == ["3"]
    assert sample.status is Sample.Status.TRUNCATED  # M14


def test_a_message_list_goes_through_the_template(checkpoint: str) -> None:
    engine = FakeEngine(say("x"))
    one(make_args(checkpoint), engine, Sample(prompt=[{"role": "user", "content": "hi"}], index=0))
    assert engine.requests[0]["input_ids"] == ids_of("u:hi;a:")


@pytest.mark.parametrize(("done", "asked"), [(5, 3), (7, 1)])
def test_a_resumed_sample_gets_the_rest_of_its_budget(checkpoint: str, done: int, asked: int) -> None:
    """L1"""
    engine = FakeEngine(say("!"))
    sample = Sample(prompt="p", index=0, tokens=ids_of("p"), status=Sample.Status.ABORTED)
    sample.append_response_tokens(tokens=ids_of("abcdefgh"[:done]), log_probs=[-1.0] * done, text="abcdefgh"[:done])
    sample = one(make_args(checkpoint), engine, sample)
    assert engine.requests[0]["sampling_params"]["max_new_tokens"] == asked
    assert engine.requests[0]["input_ids"] == ids_of("p" + "abcdefgh"[:done])
    assert sample.response == "abcdefgh"[:done] + "!" and sample.rollout_log_probs == [-1.0] * done + [-0.5]


def test_a_sample_resumed_at_its_limit_is_scored_as_it_is(checkpoint: str) -> None:
    """L1, L2: no request, tokens kept, a reward."""
    engine = FakeEngine(say("never"))
    sample = Sample(prompt="p", index=0, tokens=ids_of("p"), status=Sample.Status.ABORTED)
    sample.append_response_tokens(tokens=ids_of("abcdefgh"), log_probs=[-1.0] * 8, text="abcdefgh")
    sample = one(make_args(checkpoint), engine, sample)
    assert engine.requests == [] and sample.status is Sample.Status.TRUNCATED
    assert sample.reward == 8.0 and sample.tokens == ids_of("pabcdefgh") and sample.response_length == 8


def test_the_context_bounds_the_answer_too(checkpoint: str) -> None:
    engine = FakeEngine(say("x"))
    one(make_args(checkpoint, rollout_max_context_len=6), engine, Sample(prompt="four", index=0))
    assert engine.requests[0]["sampling_params"]["max_new_tokens"] == 2


def test_off_policy_tokens_leave_the_loss(checkpoint: str) -> None:
    """L3"""
    sample = Sample(prompt="p", index=0, tokens=ids_of("p"), status=Sample.Status.ABORTED)
    sample.append_response_tokens(tokens=ids_of("abcde"), log_probs=[-1.0] * 5, text="abcde")
    args = make_args(checkpoint, partial_rollout=True, mask_offpolicy_in_partial_rollout=True)
    assert one(args, FakeEngine(say("xyz")), sample).loss_mask == [0] * 5 + [1] * 3


def test_an_id_outside_the_vocabulary_is_never_sent(checkpoint: str) -> None:
    engine = FakeEngine(say("x"))
    with pytest.raises(ValueError, match=r"sample 7 .*token id \d+ at position 0 is outside .* of 50"):
        one(make_args(checkpoint, vocab_size=50), engine, Sample(prompt="zz", index=7))
    assert engine.requests == []


def test_finished_samples_are_left_alone(checkpoint: str) -> None:
    sample = Sample(prompt="p", index=0, tokens=[1], status=Sample.Status.COMPLETED, reward=0.5)
    engine = FakeEngine(say("x"))
    assert one(make_args(checkpoint), engine, sample) is sample and engine.requests == [] and sample.reward == 0.5


@pytest.mark.parametrize("deterministic", [False, True])
def test_sampling_seeds_depend_on_the_run_s_seed_and_the_sample(checkpoint: str, deterministic: bool) -> None:
    def seeds(seed: int) -> list[int | None]:
        SingletonMeta.clear_instances(sglang_rollout.GenerateState)
        args = make_args(checkpoint, rollout_seed=seed, sglang_enable_deterministic_inference=deterministic)
        engine = FakeEngine(say("x"))
        roll(args, engine, Prompts())
        return sorted(request["sampling_params"].get("sampling_seed", -1) for request in engine.requests)

    first = seeds(1)
    assert first == seeds(1)
    assert (len(set(first)) == 4 and first != seeds(2)) if deterministic else set(first) == {-1}


def test_sessions_are_sticky_where_the_router_can(checkpoint: str) -> None:
    engine = FakeEngine(say("x"))
    roll(make_args(checkpoint, router_policy="consistent_hashing"), engine, Prompts())
    assert len({headers["X-SMG-Routing-Key"] for headers in engine.headers}) == 4


def test_a_log_prob_that_is_not_finite_is_refused(checkpoint: str) -> None:
    engine = FakeEngine(lambda payload: answer(ids_of("x"), "x", log_prob=math.inf))
    with pytest.raises(ValueError, match="log-prob that is not finite"):
        one(make_args(checkpoint), engine, Sample(prompt="p", index=0))


def test_routing_replay_without_experts_is_an_error_at_the_first_sample(checkpoint: str) -> None:
    """P15"""
    args = make_args(checkpoint, use_rollout_routing_replay=True)
    with pytest.raises(ValueError, match=r"--use-rollout-routing-replay .*--sglang-enable-return-routed-experts"):
        one(args, FakeEngine(say("x")), Sample(prompt="p", index=0))


STREAMING = "slime.rollout.sglang_streaming_rollout.generate_streaming"


@pytest.mark.parametrize("incremental", [False, True])
def test_streams_add_up_to_the_answer(checkpoint: str, incremental: bool) -> None:
    engine = FakeEngine(say("five", "length"))
    engine.incremental = incremental
    sample = one(
        make_args(checkpoint, custom_generate_function_path=STREAMING), engine, Sample(prompt="2+2=", index=0)
    )
    assert sample.tokens == ids_of("2+2=five") and sample.response == "five" and sample.reward == 4.0
    assert sample.rollout_log_probs == [-0.5] * 4 and sample.weight_versions == ["3"]
    assert sample.status is Sample.Status.TRUNCATED and sample.prefix_cache_info.total_prompt_tokens == 4


def test_a_broken_stream_keeps_what_has_come(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_streaming_rollout, "RETRY_S", 0.0)
    args = make_args(checkpoint, custom_generate_function_path=STREAMING, partial_rollout=True)
    engine = FakeEngine(say("five"))
    engine.breaks_after = 3
    sample = one(args, engine, Sample(prompt="2+2=", index=0))
    assert sample.status is Sample.Status.ABORTED and sample.response == "fi" and sample.reward is None
    sample = one(args, FakeEngine(say("ne")), sample)
    assert sample.response == "fine" and sample.status is Sample.Status.COMPLETED and sample.reward == 4.0


# -- rewards ------------------------------------------------------------------------------------------------------


async def bad_reward(args: Namespace, sample: Sample, **kwargs: Any) -> Any:
    return {"None": None, "nan": float("nan"), "text": "1"}[args.reward_key or "None"]


@pytest.mark.parametrize("kind", ["None", "nan", "text"])
def test_a_bad_reward_ends_the_rollout_with_one_message(checkpoint: str, kind: str) -> None:
    args = make_args(checkpoint, custom_rm_path=f"{__name__}.bad_reward", reward_key=kind)
    with pytest.raises(ValueError, match=r"sample \d .*reward from .*bad_reward is .*, not a finite number"):
        roll(args, FakeEngine(say("x")), Prompts())


async def dict_reward(args: Namespace, sample: Sample, **kwargs: Any) -> dict[str, float]:
    return {"score": float(sample.index % 2), "fmt": 0.0}


STD_FILTER = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"


def test_dict_rewards_work_everywhere_with_a_key(checkpoint: str) -> None:
    """R8, R9: filter, progress bar and batch."""
    args = make_args(checkpoint, custom_rm_path=f"{__name__}.dict_reward", dynamic_sampling_filter_path=STD_FILTER)
    args.reward_key = "score"
    output, _ = roll(args, FakeEngine(say("x")), Prompts())
    assert len(output.samples) == 2 and output.metrics == {}


def test_dict_rewards_without_key_name_the_flag(checkpoint: str) -> None:
    """R8"""
    args = make_args(checkpoint, custom_rm_path=f"{__name__}.dict_reward")
    with pytest.raises(ValueError, match="set --reward-key"):
        roll(args, FakeEngine(say("x")), Prompts())


async def group_reward(args: Namespace, samples: list[Sample], **kwargs: Any) -> list[float]:
    return [float(i) for i, _ in enumerate(samples)]


def test_group_reward(checkpoint: str) -> None:
    args = make_args(checkpoint, group_rm=True, custom_rm_path=f"{__name__}.group_reward")
    output, _ = roll(args, FakeEngine(say("x")), Prompts())
    assert [[sample.reward for sample in group] for group in output.samples] == [[0.0, 1.0], [0.0, 1.0]]


async def cannot_grade(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    sample.metadata |= {"grader_failure": "error", "grader_failure_reason": "no such library"}
    return 0.0


def test_a_rollout_that_nobody_could_grade_ends_the_run(checkpoint: str) -> None:
    args = make_args(checkpoint, custom_rm_path=f"{__name__}.cannot_grade")
    with pytest.raises(RuntimeError, match=r"grading failed for all 4 samples .*sample \d .*: no such library"):
        roll(args, FakeEngine(say("x")), Prompts())


def test_warnings_of_gradings_are_throttled(caplog: pytest.LogCaptureFixture) -> None:
    from slime.rollout.rm_hub.failures import _Warnings

    warnings = _Warnings()
    for i in range(5):
        warnings.warn(f"sample {i}")
    warnings._next = 0.0
    warnings.warn("sample 5")
    assert [r.getMessage() for r in caplog.records] == ["sample 0", "sample 5 (4 more since the last such warning)"]


# -- the batch ----------------------------------------------------------------------------------------------------


def drop_first(args: Namespace, group: list[Sample], **kwargs: Any) -> DynamicFilterOutput:
    return DynamicFilterOutput(keep=group[0].group_index != 0, reason="first")


def drop_all(args: Namespace, group: list[Sample], **kwargs: Any) -> bool:
    return False


def test_one_rejected_group_costs_one_more(checkpoint: str) -> None:
    """L7: batch 4, refill 1."""
    args = make_args(checkpoint, rollout_batch_size=4, over_sampling_batch_size=1)
    args.dynamic_sampling_filter_path = f"{__name__}.drop_first"
    source = Prompts()
    output, _ = roll(args, FakeEngine(say("x")), source)
    assert source.asked == [1] * 5
    assert [group[0].group_index for group in output.samples] == [1, 2, 3, 4]
    assert output.metrics == {"rollout/dynamic_filter/drop_first": 1}


def test_a_filter_that_drops_everything_says_so(checkpoint: str) -> None:
    args = make_args(checkpoint, rollout_batch_size=1, over_sampling_batch_size=8, dynamic_sampling_max_drops=10)
    args.dynamic_sampling_filter_path = f"{__name__}.drop_all"
    with pytest.raises(RuntimeError, match=r"drop_all dropped 11 groups .* has 0 of 1: 11 x unnamed.*-max-drops 10"):
        roll(args, FakeEngine(say("x")), Prompts())


SEEN: list[Any] = []


def note_all(args: Namespace, groups: list[Any], data_source: Any) -> None:
    SEEN.append((groups, data_source))


def mark_removed(args: Namespace, data: list[Any]) -> None:
    data[0][0].remove_sample = True


def drop_even(args: Namespace, group: list[Sample], **kwargs: Any) -> bool:
    return group[0].group_index % 2 == 1


def test_hooks_see_what_they_should(checkpoint: str) -> None:
    """L4: the all-samples hook sees filtered groups too, and the data source itself."""
    SEEN.clear()
    args = make_args(checkpoint, over_sampling_batch_size=4)
    args.dynamic_sampling_filter_path = f"{__name__}.drop_even"
    args.rollout_all_samples_process_path = f"{__name__}.note_all"
    args.rollout_sample_filter_path = f"{__name__}.mark_removed"
    source = Prompts()
    output, _ = roll(args, FakeEngine(say("x")), source)
    ((groups, data_source),) = SEEN
    assert sorted(group[0].group_index for group in groups) == [0, 1, 2, 3] and data_source is source
    assert [group[0].group_index for group in output.samples] == [1, 3] and output.samples[0][0].remove_sample


def shout(args: Namespace, sample: Sample, *, rollout_id: int | None, evaluation: bool) -> None:
    sample.response += f" {rollout_id} {evaluation}"


async def replace(args: Namespace, sample: Sample) -> Sample:
    return Sample.from_dict({**sample.to_dict(), "replaced": True})


def test_sample_hooks_run_before_the_reward(checkpoint: str) -> None:
    args = make_args(checkpoint, rollout_sample_hook_path=[f"{__name__}.shout", f"{__name__}.replace"])
    output, _ = roll(args, FakeEngine(say("x")), Prompts(), rollout_id=5)
    sample = output.samples[0][0]
    assert sample.response == "x 5 False" and sample.reward == 9.0 and sample.replaced


async def fan_out(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    parts = [Sample.from_dict(sample.to_dict()) for _ in range(1 + sample.index % 2)]
    for part in parts:
        part.rollout_id, part.status, part.tokens = sample.index, Sample.Status.COMPLETED, [1]
        part.append_response_tokens(tokens=[2], log_probs=[-1.0], text="x")
    return parts


def test_fan_out_passes_the_std_filter(checkpoint: str) -> None:
    """L5: one trajectory of two samples with 1, one with 0 → kept."""
    args = make_args(checkpoint, custom_generate_function_path=f"{__name__}.fan_out")
    args.custom_rm_path, args.dynamic_sampling_filter_path = f"{__name__}.fan_out_reward", STD_FILTER
    output, _ = roll(args, FakeEngine(say("unused")), Prompts())
    assert [[len(item) for item in group] for group in output.samples] == [[1, 2], [1, 2]]


async def fan_out_reward(args: Namespace, samples: list[Sample], **kwargs: Any) -> list[float]:
    return [float(sample.rollout_id % 2) for sample in samples]


async def forgets_status(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    return sample


def test_a_generate_function_must_set_the_status(checkpoint: str) -> None:
    args = make_args(checkpoint, custom_generate_function_path=f"{__name__}.forgets_status")
    with pytest.raises(ValueError, match=r"sample 0 .*forgets_status left the status pending"):
        roll(args, FakeEngine(say("x")), Prompts())


async def sees_evaluation(args: Namespace, sample: Sample, sampling_params: Any, evaluation: bool = True) -> Sample:
    sample.tokens, sample.status, sample.response = [1], Sample.Status.COMPLETED, "e" if evaluation else "train"
    return sample


def test_generate_functions_are_told_of_evaluation(checkpoint: str) -> None:
    args = make_args(checkpoint, custom_generate_function_path=f"{__name__}.sees_evaluation")
    output, _ = roll(args, FakeEngine(say("x")), Prompts())
    assert output.samples[0][0].response == "train"


def test_module_functions_can_be_replaced(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def mine(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
        sample.tokens, sample.status, sample.response = [1], Sample.Status.COMPLETED, "mine"
        return sample

    monkeypatch.setattr(sglang_rollout, "generate", mine)
    engine = FakeEngine(say("x"))
    output, _ = roll(make_args(checkpoint), engine, Prompts())
    assert output.samples[1][1].response == "mine" and engine.requests == []


# -- abort --------------------------------------------------------------------------------------------------------


def slow_from(group: int) -> Callable[[dict[str, Any]], bool]:
    return lambda payload: int(byte_tokenizer().decode(payload["input_ids"])[1]) >= group


@pytest.mark.parametrize("partial", [False, True])
def test_the_rest_is_aborted_when_the_batch_is_full(checkpoint: str, partial: bool) -> None:
    engine = FakeEngine(say("x"))
    engine.hold, engine.partial = slow_from(2), ids_of("pp")
    args = make_args(checkpoint, over_sampling_batch_size=3, partial_rollout=partial)
    source = Prompts()
    output, returned = roll(args, engine, source, rollout_id=4)
    assert [group[0].group_index for group in output.samples] == [0, 1] and engine.aborts >= 1
    assert output.metrics == ({} if partial else {"rollout/unused_groups": 1})
    assert len(returned) == int(partial)
    for sample in returned[0] if partial else []:
        assert sample.status is Sample.Status.ABORTED and sample.reward is None
        assert (sample.response, sample.response_length) == ("pp", 2)  # L2: what was there is kept
        assert sample.metadata["start_rollout_id"] == 4


def test_a_returned_group_is_finished_in_the_next_rollout(checkpoint: str) -> None:
    engine = FakeEngine(say("x"))
    engine.hold, engine.partial = slow_from(2), ids_of("pp")
    args = make_args(checkpoint, over_sampling_batch_size=3, partial_rollout=True)
    _, returned = roll(args, engine, Prompts())

    class Returned(Prompts):
        def get_samples(self, number: int) -> list[list[Sample]]:
            return returned[:number]

    args.rollout_batch_size = args.over_sampling_batch_size = 1
    output, _ = roll(args, FakeEngine(say("yz")), Returned())
    sample = output.samples[0][0]
    assert sample.response == "ppyz" and sample.reward == 4.0 and sample.rollout_log_probs == [-0.5] * 4


def test_one_unreachable_engine_does_not_stop_the_abort(checkpoint: str, caplog: pytest.LogCaptureFixture) -> None:
    """L10"""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{closed.getsockname()[1]}"
    engine = FakeEngine(say("x"))
    engine.hold = slow_from(2)

    async def call() -> Any:
        engine.workers = [dead, f"http://127.0.0.1:{engine.port}", f"http://127.0.0.1:{engine.port}"]
        return await sglang_rollout.generate_rollout_async(args, 0, Prompts())

    args = make_args(checkpoint, over_sampling_batch_size=3)
    with caplog.at_level(logging.WARNING):
        output, _ = with_engine(args, engine, call)
    assert engine.aborts >= 2 and f"abort of engine {dead} failed" in caplog.text and len(output.samples) == 2


def test_tasks_that_ignore_the_abort_are_cancelled(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """L7: the drain ends, and the prompt is not lost."""
    monkeypatch.setattr(engine_abort, "DRAIN_LIMIT_S", 0.3)
    monkeypatch.setattr(engine_abort, "REPEAT_S", 0.1)
    args = make_args(checkpoint, over_sampling_batch_size=3, partial_rollout=True)
    args.custom_generate_function_path = f"{__name__}.never_ends"
    _, returned = roll(args, FakeEngine(say("x")), Prompts())
    ((first, _),) = returned
    assert first.group_index == 2 and first.status is Sample.Status.PENDING and first.tokens == []


async def never_ends(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    if sample.group_index == 2:
        sample.tokens = [1, 2, 3]
        await asyncio.sleep(3600)
    sample.tokens, sample.status = [1], Sample.Status.COMPLETED
    return sample


def test_a_sample_that_an_engine_aborted_is_tried_again(checkpoint: str) -> None:
    """R10: it never reaches training with reward None."""
    tries: list[int] = []

    def reply(payload: dict[str, Any]) -> dict[str, Any]:
        tries.append(len(payload["input_ids"]))
        return answer(ids_of("ab"), "ab", "abort" if len(tries) == 1 else "stop")

    output, _ = roll(make_args(checkpoint), FakeEngine(reply), Prompts())
    rewards = [sample.reward for group in output.samples for sample in group]
    assert rewards == [2.0] * 4 and output.metrics == {"rollout/aborted_groups_retried": 1}
    assert set(tries) == {2} and len(tries) == 5  # the retry begins at the bare prompt, the others are not redone


def test_engines_that_always_abort_end_the_run(checkpoint: str) -> None:
    with pytest.raises(RuntimeError, match=r"group was aborted 6 times"):
        roll(make_args(checkpoint), FakeEngine(say("x", "abort")), Prompts())


async def gives_up(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    sample.tokens, sample.status, sample.remove_sample, sample.reward = [1], Sample.Status.ABORTED, True, 0.0
    return sample


def test_an_aborted_stub_that_is_out_of_the_loss_is_taken(checkpoint: str) -> None:
    args = make_args(checkpoint, custom_generate_function_path=f"{__name__}.gives_up")
    output, _ = roll(args, FakeEngine(say("x")), Prompts())
    assert len(output.samples) == 2 and output.metrics == {}


def test_a_reset_sample_is_a_bare_prompt() -> None:
    """M7"""
    sample = Sample(prompt="p", index=1, group_index=2, label="l", metadata={"a": 1}, tokens=[1])
    bare = Sample.from_dict({**sample.to_dict(), "tokens": []})
    sample.append_response_tokens(tokens=[5] * 5, log_probs=[-1.0] * 5, text="x" * 5)
    sample.reward, sample.status = 1.0, Sample.Status.ABORTED
    reset_sample(sample)
    assert sample == bare


# -- whole functions ----------------------------------------------------------------------------------------------


def test_generate_rollout_gives_partial_groups_back(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def stand_in(args: Namespace, rollout_id: int, data_source: Any) -> Any:
        return RolloutFnTrainOutput(samples=[]), [["group"]]

    monkeypatch.setattr(sglang_rollout, "generate_rollout_async", stand_in)
    source = Prompts()
    sglang_rollout.generate_rollout(make_args(checkpoint), 6, source)
    assert source.returned == [["group"]] and source.rollout_id == 6


def test_model_urls() -> None:
    args = rollout_args(sglang_router_ip="::1", sglang_router_port=7)
    assert sglang_rollout.get_model_url(args, "any", "/health") == "http://[::1]:7/health"
    args.sglang_model_routers = {"ref": ("1.2.3.4", 5)}
    assert sglang_rollout.get_model_url(args, "ref") == "http://1.2.3.4:5/generate"
    with pytest.raises(KeyError, match=r"no model 'reff' is served; there are \['ref'\]"):
        sglang_rollout.get_model_url(args, "reff")


def test_requests_wait_for_new_engines_under_fault_tolerance() -> None:
    """All engines may be gone: what replaces them takes --engine-start-timeout to start."""
    assert retry_limits(Namespace(use_fault_tolerance=False)) == {}
    limits = retry_limits(Namespace(use_fault_tolerance=True, engine_start_timeout=600.0))
    assert limits["retry_seconds"] > 600 and limits["max_retries"] > 600
