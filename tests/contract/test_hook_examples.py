"""The worked example of every hook fits its flag, and does what it says."""

from __future__ import annotations

import asyncio
import json
import logging
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from examples.hooks import EXAMPLES
from slime.utils.arguments.hooks import HOOKS, assert_hook
from slime.utils.misc import SingletonMeta, load_function
from slime.utils.types import Sample
from tests.support.base_config import BaseConfig
from tests.support.gloo_world import GlooWorld
from tests.support.rollout_args import rollout_args


def example(dest: str) -> Any:
    return load_function(EXAMPLES[dest])


def sample(reward: float = 0.0, group: int = 0, **given: Any) -> Sample:
    values = {"prompt": "1+1=", "label": "2", "tokens": [5, 6, 7], "response_length": 2, "response": "so\n2"}
    return Sample(**{**values, "reward": reward, "group_index": group, "index": 0, **given})


def test_there_is_one_of_each() -> None:
    assert set(EXAMPLES) == {hook.dest for hook in HOOKS}
    assert len(set(EXAMPLES.values())) == len(EXAMPLES)


@pytest.mark.parametrize("dest", EXAMPLES)
def test_signature(dest: str) -> None:
    assert_hook(f"--{dest.replace('_', '-')}", EXAMPLES[dest])


def test_rollouts_convert_to_train_data() -> None:
    """A rollout from a data source of one's own, converted by the default and by a conversion of one's own."""
    from slime.ray.train_data import convert_samples_to_train_data, flatten_samples
    from slime.rollout.base_types import call_rollout_fn

    args = rollout_args()
    output = call_rollout_fn(
        example("rollout_function_path"), args, 0, example("data_source_path")(args), evaluation=False
    )
    samples = flatten_samples(output.samples)
    assert [sample.reward for sample in samples] == [0.0, 1.0, 0.0, 1.0]
    default = convert_samples_to_train_data(args, samples)
    own = example("custom_convert_samples_to_train_data_path")(args, samples)
    assert set(own) <= set(default)
    for column in set(own) - {"rewards"}:
        assert own[column] == default[column], column


def test_evaluation() -> None:
    from slime.rollout.base_types import call_rollout_fn

    output = call_rollout_fn(example("eval_function_path"), rollout_args(), 0, None, evaluation=True)
    assert output.data["constant"]["rewards"] == [0.0, 1.0]


def test_data_source_goes_on(tmp_path: Path) -> None:
    args = rollout_args(save=str(tmp_path), load=str(tmp_path))
    source = example("data_source_path")(args)
    first = source.get_samples(2)
    assert [len(group) for group in first] == [2, 2]
    assert eval(str(first[0][0].prompt).rstrip("=")) == int(str(first[0][0].label))
    source.save(0)
    again = example("data_source_path")(args)
    again.load(0)
    assert again.get_samples(1)[0][0].prompt == source.get_samples(1)[0][0].prompt


def test_buffer_filter() -> None:
    groups = [[sample(group=index)] for index in range(3)]
    buffer = list(groups)
    assert example("buffer_filter_path")(rollout_args(), None, buffer, 2) == groups[1:]
    assert buffer == groups[:1]


@pytest.fixture
def fresh_state() -> Iterator[None]:
    from slime.rollout.sglang_rollout import GenerateState

    SingletonMeta.clear_instances(GenerateState)
    yield
    SingletonMeta.clear_instances(GenerateState)


def test_two_turns(tmp_path: Path, fresh_state: None) -> None:
    """Both answers are trained with the engine's log-probs; the question between them is not."""
    from slime.rollout import sglang_rollout
    from slime.utils.http_utils import close_client
    from tests.support.fake_engine import FakeEngine, answer
    from tests.support.toy_tokenizer import byte_tokenizer

    byte_tokenizer("{{ messages }}").save_pretrained(tmp_path)
    path = EXAMPLES["custom_generate_function_path"]
    reward = EXAMPLES["custom_rm_path"]
    args = rollout_args(
        hf_checkpoint=str(tmp_path),
        custom_generate_function_path=path,
        custom_rm_path=reward,
        rollout_max_response_len=90,
    )
    ids = byte_tokenizer().encode("\n2", add_special_tokens=False)
    engine = FakeEngine(lambda payload: answer(ids, "\n2"))

    async def run() -> Any:
        async with engine:
            args.sglang_router_port = engine.port
            state = sglang_rollout.GenerateState(args)
            fresh = Sample(prompt="1+1=", label="2", group_index=0, index=0)
            try:
                return await sglang_rollout.generate_and_rm(args, fresh, state.sampling_params)
            finally:
                await close_client()

    done = asyncio.run(run())
    assert len(engine.requests) == 2
    assert done.reward == 1.0
    trained = [token for token, mask in zip(done.tokens[-done.response_length :], done.loss_mask, strict=True) if mask]
    assert trained == ids + ids and 0 in done.loss_mask


def test_sample_hook_and_reward() -> None:
    noted = example("rollout_sample_hook_path")(rollout_args(), sample(), rollout_id=0)
    assert noted.metadata["lines"] == 2
    score = example("custom_rm_path")
    assert asyncio.run(score(rollout_args(), sample())) == 1.0
    assert asyncio.run(score(rollout_args(), sample(response=""))) == 0.0


def test_filters() -> None:
    from slime.rollout.filter_hub.base_types import call_dynamic_filter

    keep = example("dynamic_sampling_filter_path")
    assert call_dynamic_filter(keep, rollout_args(), [sample(0.0), sample(1.0)]).keep
    dropped = call_dynamic_filter(keep, rollout_args(), [sample(1.0), sample(1.0)])
    assert (dropped.keep, dropped.reason) == (False, "equal_rewards")
    group = [sample(status=Sample.Status.TRUNCATED), sample(status=Sample.Status.COMPLETED)]
    example("rollout_sample_filter_path")(rollout_args(), [group])
    assert [each.remove_sample for each in group] == [True, False]


def test_all_samples(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        example("rollout_all_samples_process_path")(rollout_args(), [[sample()]] * 3, None)
    assert "3 groups generated for 2 that train" in caplog.text


def test_reward_post_process() -> None:
    samples = [sample(1.0, 0), sample(0.0, 0), sample(1.0, 1), sample(1.0, 1)]
    raw, rewards = example("custom_reward_post_process_path")(rollout_args(), samples)
    assert (raw, rewards) == ([1.0, 0.0, 1.0, 1.0], [0.5, -0.5, 0.0, 0.0])


def test_metrics_of_ones_own(tmp_path: Path) -> None:
    from slime.observability.logging_utils import tracking

    (tmp_path / "config").mkdir()
    args = BaseConfig(tmp_path / "config").parse("--log-dir", tmp_path / "logs")
    with tracking(args):
        said = [sample(response="because"), sample()]
        assert example("custom_rollout_log_function_path")(3, args, said, None, 1.0) is False
        data = {"math": {"rewards": [1.0, 0.5]}}
        assert example("custom_eval_rollout_log_function_path")(3, args, data, None) is False
    lines = [json.loads(line) for line in (tmp_path / "logs" / "metrics.jsonl").read_text().splitlines()]
    logged = {name: value for line in lines for name, value in line.items()}
    assert (logged["rollout/because"], logged["eval/math-worst"], logged["rollout/step"]) == (0.5, 0.5, 3)


def test_train_data_and_advantages() -> None:
    import torch

    data: dict[str, Any] = {"kl": [torch.zeros(2), torch.zeros(3)], "rewards": [5.0, -1.0]}
    example("custom_advantage_function_path")(Namespace(), data)
    assert data["advantages"][1].tolist() == data["returns"][1].tolist() == [-1.0] * 3
    example("rollout_data_postprocess_path")(Namespace(), 0, data)
    assert data["advantages"][0].tolist() == [3.0, 3.0]


def test_custom_loss() -> None:
    """One sample, prompt 1 and response 2 tokens, uniform logits over 4 ids: -A log(1/4) per token."""
    import torch

    args = Namespace(rollout_temperature=1.0, log_probs_chunk_size=-1, vocab_size=4)
    batch = {"unconcat_tokens": [torch.tensor([0, 1, 2])], "total_lengths": [3], "response_lengths": [2]}
    batch["advantages"] = [torch.tensor([1.0, 2.0])]
    logits = torch.zeros(1, 3, 4, requires_grad=True)
    loss, metrics = example("custom_loss_function_path")(args, batch, logits, torch.mean)
    assert loss.item() == metrics["loss"].item() == pytest.approx(1.5 * torch.log(torch.tensor(4.0)).item())
    loss.backward()
    assert logits.grad is not None and logits.grad.abs().sum() > 0


def test_importance_and_reducer() -> None:
    import torch

    masks = [torch.ones(2), torch.tensor([1.0, 0.0])]
    loss, kept, metrics = example("custom_tis_function_path")(
        Namespace(tis_clip=2.0),
        pg_loss=torch.ones(4),
        train_log_probs=[torch.tensor([0.0, -2.0]), torch.zeros(2)],
        rollout_log_probs=[torch.zeros(2), torch.zeros(2)],
        loss_masks=masks,
        total_lengths=[3, 3],
        response_lengths=[2, 2],
    )
    assert loss.tolist() == [1, 0, 1, 1] and kept is masks and metrics["outliers"].tolist() == [0, 1, 0, 0]
    reduce = example("custom_pg_loss_reducer_function_path")([3, 3], [2, 2], masks, False)
    assert reduce(torch.full((4,), 2.0)).item() == pytest.approx(6 / 1000)


def test_trainer_hooks(caplog: pytest.LogCaptureFixture) -> None:
    import torch

    with caplog.at_level(logging.INFO):
        example("custom_megatron_init_path")(Namespace(data_parallel_size=4))
    assert "4 data-parallel ranks" in caplog.text
    chunk = torch.nn.Dropout()
    example("custom_megatron_before_log_prob_hook_path")(Namespace(), [chunk], "ref_")
    assert not chunk.training
    optimizer = SimpleNamespace(param_groups=[{"lr": 1.0}])
    for rollout_id, rate in ((1, 1.0), (0, 0.25)):
        example("custom_megatron_before_train_step_hook_path")(Namespace(lr=0.5), rollout_id, 0, [], optimizer, None)
        assert optimizer.param_groups[0]["lr"] == rate


def test_files_of_a_weight_sync(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "model.safetensors").touch()
    with caplog.at_level(logging.INFO):
        example("custom_update_weight_post_write_path")(Namespace(), str(tmp_path), [None, None])
    assert "model.safetensors for 2 engines" in caplog.text


def build(config_folder: str, flag: str, words: list[str]) -> tuple[int, list[str]]:
    """Number and names of the parameters of the model that the hook gives, built as a run builds it."""
    from megatron_tiny import init_layout, make_args

    from slime.backends.megatron_utils.model_provider import get_model_provider_func

    args = make_args(config_folder, flags=" ".join([flag, *words]))
    init_layout(args)
    model = get_model_provider_func(args)()
    return sum(parameter.numel() for parameter in model.parameters()), [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("dest", ["custom_model_provider_path", "spec"])
def test_model(
    gloo_world: Callable[[int], GlooWorld], tmp_path: Path, dest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "integration")
    config = BaseConfig(tmp_path)
    path = EXAMPLES[dest]
    words = path.rsplit(".", 1) if dest == "spec" else [path]
    ((count, names),) = gloo_world(1).run(build, str(config.model), f"--{dest.replace('_', '-')}", words)
    layers = {name.split(".")[2] for name in names if ".layers." in name}
    assert layers == {str(index) for index in range(4 if dest == "spec" else 2)}
    assert count > 0
