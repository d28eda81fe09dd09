"""A run on a server that it has not started, through slime's own router."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from slime.backends.sglang_utils.external import ExternalEngineInfo
from slime.backends.sglang_utils.sglang_config import ModelConfig
from slime.ray.engine_group import RolloutServer, start_rollout_servers
from slime.ray.engine_recovery import EngineRecovery
from slime.ray.external_group import ExternalGroup, on_host
from slime.ray.placement_group import Placement, create_placement_groups
from slime.ray.router import start_router
from slime.ray.utils import get_all
from slime.rollout.sglang_rollout import get_model_url
from slime.router.app import SESSION_HEADER
from slime.router.client import fill_sample
from slime.utils.health_monitor import RolloutHealthMonitor
from slime.utils.http_utils import close_client, post
from slime.utils.types import Sample
from tests.support.base_config import BaseConfig
from tests.support.info_server import InfoServer

if TYPE_CHECKING:
    from tests.support.engine import SGLangServer


@pytest.fixture
def args(sglang_server: SGLangServer, tmp_path: Path) -> Namespace:
    base = BaseConfig(tmp_path)
    del base.flags["--colocate"]
    return base.parse(
        "--rollout-external-engine-addrs", urlsplit(sglang_server.url).netloc, "--use-slime-router",
        "--debug-rollout-only", "--hf-checkpoint", sglang_server.model_dir, "--log-dir", tmp_path / "logs",
    )  # fmt: skip


@pytest.fixture
def server(args: Namespace, ray_cluster: str) -> Iterator[RolloutServer]:
    from ray.util.placement_group import remove_placement_group

    placement = create_placement_groups(args)["rollout"]
    (started,) = start_rollout_servers(args, placement).values()
    started.wait_ready()
    yield started
    started.shutdown()
    remove_placement_group(placement.pg)


def test_turns_by_text_train_exactly_what_was_sampled(
    args: Namespace, server: RolloutServer, sglang_server: SGLangServer
) -> None:
    """Random bytes are sampled, which make no valid text: to tokenise the text would give other tokens."""

    async def talk() -> tuple[list[dict[str, Any]], Sample, str]:
        sampling = {"max_new_tokens": 12, "temperature": 1.0, "ignore_eos": True}
        text, outputs = "1+1=", []
        for _ in range(3):
            url, headers = get_model_url(args, "actor"), {SESSION_HEADER: "talk"}
            outputs.append(await post(url, {"text": text, "sampling_params": sampling}, headers=headers))
            text += outputs[-1]["text"] + "\nGo on: "
        sample = await fill_sample(args, Sample(session_id="talk", index=0), text)
        await close_client()
        return outputs, sample, text

    outputs, sample, text = asyncio.run(talk())
    entries = [entry for output in outputs for entry in output["meta_info"]["output_token_logprobs"]]
    trained = [index for index, mask in enumerate(sample.loss_mask or []) if mask]
    begin = len(sample.tokens) - sample.response_length
    assert len(trained) == 36
    assert [sample.tokens[begin + index] for index in trained] == [token for _, token, _ in entries]
    assert [(sample.rollout_log_probs or [])[index] for index in trained] == [value for value, _, _ in entries]
    assert outputs[2]["session"]["prompt_tokens_reused"] > 24

    from slime.utils.processing_utils import load_tokenizer

    tokenizer = load_tokenizer(str(sglang_server.model_dir))
    assert tokenizer.encode(text, add_special_tokens=False) != sample.tokens


def test_the_server_is_not_the_runs(args: Namespace, server: RolloutServer, sglang_server: SGLangServer) -> None:
    """It has no devices of the run, does not sleep, and outlives the actors that spoke to it."""
    assert (server.engine_gpu_counts, server.num_new_engines) == ([1], 1)
    server.offload()
    server.shutdown()
    assert server.router.has_ended
    answer = sglang_server.client.post(
        "/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}, timeout=60
    )
    assert answer["meta_info"]["completion_tokens"] == 1


def test_the_actor_of_a_server_with_local_files_runs_on_its_host(ray_cluster: str) -> None:
    import ray

    assert on_host("http://127.0.0.1:30000") == {f"node:{ray.util.get_node_ip_address()}": 0.001}
    with pytest.raises(RuntimeError, match=r"on the host of http://\[2001:db8::1\]:30000, where no Ray node is"):
        on_host("http://[2001:db8::1]:30000")


def test_a_server_that_comes_back_is_attached_again(ray_cluster: str, tmp_path: Path) -> None:
    """With fault tolerance: it is taken out when it is gone, and serves again after weights were sent."""
    first = InfoServer({})
    args = Namespace(
        log_dir=str(tmp_path), engine_start_timeout=20.0, update_weight_timeout=20.0, hf_checkpoint="m",
        rollout_health_check_interval=60.0, rollout_health_check_timeout=1.0, rollout_health_check_first_wait=0.0,
        sglang_router_ip=None, sglang_router_port=None, sglang_router_request_timeout_secs=60, use_slime_router=True,
        slime_router_middleware_paths=None,
    )  # fmt: skip
    info = ExternalEngineInfo(f"http://{first.addr}", "regular", 1)
    router = start_router(args)
    group = ExternalGroup.of(args, Placement(None, [], []), info, router, 0)
    (refs,) = group.start_engines(register=False).values()
    get_all(refs, timeout=60.0)
    model = ModelConfig("actor", "m", (group.config,))
    recovery = EngineRecovery(args, RolloutServer(args, model, router, [group], []))
    monitor = RolloutHealthMonitor(recovery, args)
    monitor.start()
    try:
        first.stop()
        assert recovery.lost.wait(60.0) and group.numbers == []
        second = InfoServer({}, first.port)
        recovery.recover()
        assert group.num_new_engines == 2 and recovery.lost.is_set(), "it has no weights yet"
        recovery.admit()
        assert not recovery.lost.is_set() and recovery.serving() == group.engines
        assert [worker["url"] for worker in router.workers()] == [info.url]
        assert "/continue_generation" in second.paths
        second.stop()
    finally:
        monitor.stop()
        recovery.server.kill()
