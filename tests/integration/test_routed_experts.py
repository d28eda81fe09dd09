"""Experts that a real SGLang engine returns with its tokens, and the trainer's on the same tokens."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import moe_scenarios
import pytest

from slime.backends.sglang_utils.server_args import EngineAddress, EngineShape, compute_layers
from slime.backends.sglang_utils.server_process import ServerProcess
from slime.ray.router import register_worker, start_router
from slime.rollout import sglang_rollout
from slime.utils import accelerator
from slime.utils.misc import SingletonMeta, get_free_port
from slime.utils.types import Sample
from tests.integration.test_rollout_engine import run
from tests.support.engine import START_TIMEOUT_S
from tests.support.gloo_world import GlooWorld
from tests.support.make_local_model import make_tokenizer
from tests.support.rollout_args import rollout_args

LAYERS, EXPERTS, TOP_K = 3, 8, 2


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    directory = tmp_path_factory.mktemp("engine") / "tiny_moe"
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64, moe_intermediate_size=32, head_dim=16,
        num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2, num_experts=EXPERTS,
        num_experts_per_tok=TOP_K, norm_topk_prob=True, max_position_embeddings=4096, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)  # so that positions route differently
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def args(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Namespace]:
    """Of a rollout with R3, on an engine behind the real router."""
    folder = tmp_path_factory.mktemp("engine")
    device = accelerator.current()
    made = rollout_args(hf_checkpoint=str(model_dir), sglang_router_ip=None, sglang_router_port=None, vocab_size=None)
    made.seed, made.offload_rollout, made.use_rollout_routing_replay = 1, False, True
    made.num_layers, made.num_experts, made.moe_router_topk = LAYERS, EXPERTS, TOP_K
    made.log_dir, made.sglang_router_request_timeout_secs = str(folder), 60
    address = EngineAddress("127.0.0.1", get_free_port(), get_free_port())
    layers = compute_layers(made, 0, EngineShape(num_gpus=1), address, device.engine_server_args())
    server = ServerProcess(layers, device.engine_env(), folder / "sglang.log")
    router = start_router(made)
    made.sglang_router_ip, made.sglang_router_port = router.ip, router.port
    server.wait_ready(START_TIMEOUT_S)
    register_worker(router.url, {"url": server.url, "worker_type": "regular"})
    router.wait_workers([server.url], 30)
    SingletonMeta.clear_instances(sglang_rollout.GenerateState)
    yield made
    SingletonMeta.clear_instances(sglang_rollout.GenerateState)
    router.stop()
    server.stop()


async def two_turns(args: Namespace, prompt: str) -> Sample:
    """An answer, a tool's words, another answer that is cut, its continuation, and words that no engine reads."""
    sample = Sample(prompt=prompt, index=0, group_index=0)
    sampling: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 9, "ignore_eos": True}
    await sglang_rollout.generate(args, sample, sampling)
    sample.append_response_tokens(args, tokens=[40, 41, 42, 43, 44], trainable=False)
    for budget in (20, 27):
        await sglang_rollout.generate(args, sample, {**sampling, "max_new_tokens": budget})
    assert len(sample.rollout_routed_experts) == len(sample.tokens) - 1
    sample.append_response_tokens(args, tokens=[50, 51], trainable=False)
    return sample


@pytest.fixture(scope="module")
def samples(args: Namespace) -> list[Sample]:
    async def make() -> list[Sample]:
        return [await two_turns(args, prompt) for prompt in ("a question", "another, longer question?")]

    return run(make())


def test_experts_stay_aligned_over_turns(args: Namespace, samples: list[Sample]) -> None:
    """Rows gathered over four requests are those of one request over the whole sequence."""
    import torch

    for sample in samples:
        whole = Sample(prompt=sample.prompt, tokens=sample.tokens[:-2], response="x", response_length=1)
        whole.loss_mask, whole.rollout_log_probs = [1], [0.0]
        run(sglang_rollout.generate(args, whole, {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}))
        rows = sample.rollout_routed_experts
        assert rows.shape == (len(sample.tokens) - 3, LAYERS, TOP_K) and rows.min() >= 0 and rows.max() < EXPERTS
        assert torch.equal(whole.rollout_routed_experts[: len(rows)].sort().values, rows.sort().values)


def test_the_trainer_chooses_the_same_experts(
    samples: list[Sample], model_dir: Path, gloo_world: Callable[[int], GlooWorld]
) -> None:
    """In float32 nearly everywhere; a shift by one token would show. Replay then changes as little."""
    columns = {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "loss_masks": [sample.loss_mask for sample in samples],
        "rollout_routed_experts": [sample.rollout_routed_experts.tolist() for sample in samples],
    }
    gloo_world(1).run(moe_scenarios.engine_experts_are_the_trainers, str(model_dir), columns)
    gloo_world(2).run(moe_scenarios.engine_experts_reach_the_routers, str(model_dir), columns)
