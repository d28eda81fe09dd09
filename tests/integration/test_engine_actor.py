"""SGLang engines as the rollout manager starts them: Ray actors behind a router, and what becomes of them."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from slime.ray.engine_group import RolloutServer, start_rollout_servers
from slime.ray.placement_group import Placement, create_placement_groups
from slime.utils.http_utils import close_client, post

START_SECONDS = 400.0


def arguments(model: Path | str, log_dir: Path, **given: Any) -> Namespace:
    defaults = {
        "actor_num_gpus_per_node": 1,
        "actor_num_nodes": 1,
        "colocate": True,
        "debug_rollout_only": False,
        "debug_train_only": False,
        "engine_start_timeout": START_SECONDS,
        "update_weight_timeout": 60.0,
        "hf_checkpoint": str(model),
        "log_dir": str(log_dir),
        "num_gpus_per_node": 8,
        "offload_rollout": True,
        "rollout_num_gpus": 1,
        "rollout_num_gpus_per_engine": 1,
        "seed": 1,
        "sglang_max_total_tokens": 4096,
        "sglang_router_ip": None,
        "sglang_router_port": None,
        "sglang_router_request_timeout_secs": 60,
        "use_critic": False,
    }
    return Namespace(**{**defaults, **given})


@pytest.fixture
def placement(ray_cluster: str) -> Any:
    from ray.util.placement_group import remove_placement_group

    placed: Placement = create_placement_groups(arguments("m", Path()))["rollout"]
    yield placed
    remove_placement_group(placed.pg)


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return condition()


def processes_of(server: RolloutServer) -> list[psutil.Process]:
    """The engine actor's process and everything below it."""
    import ray

    (engine,) = server.engines
    state = ray.get(engine.__ray_call__.remote(lambda _: os.getpid()))
    actor = psutil.Process(state)
    return [actor, *actor.children(recursive=True)]


def test_life_of_an_engine(placement: Placement, tiny_model_dir: Path, tmp_path: Path) -> None:
    """Start, generate through the router, offload and onload, and the end: nothing survives the killed actor."""
    import ray

    args = arguments(tiny_model_dir, tmp_path, sglang_enable_deterministic_inference=True)
    (server,) = start_rollout_servers(args, placement).values()
    server.wait_ready()
    try:
        _check_it_serves(args, server)
        _check_seeds_repeat(f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate")
        server.offload()
        server.onload_weights()
        server.onload_kv()
        assert ray.get(server.engines[0].health_generate.remote(timeout=30.0))
        assert (tmp_path / "engine-0.log").read_text().count("memory saver does not run on this device") == 1

        running = processes_of(server)
        assert running[0].memory_info().rss < 300e6  # neither torch nor SGLang is imported there
        assert len(running) >= 6  # actor, guard (two processes), server, scheduler, detokenizer
        running[0].send_signal(signal.SIGKILL)
        assert wait_for(lambda: not any(process.is_running() for process in running))
    finally:
        server.kill()


def _check_it_serves(args: Namespace, server: RolloutServer) -> None:
    from slime.backends.sglang_utils.control_client import ControlClient

    client = ControlClient(f"http://{args.sglang_router_ip}:{args.sglang_router_port}")
    assert args.sglang_model_routers == {"actor": (args.sglang_router_ip, args.sglang_router_port)}
    answer = client.post("/generate", {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 3}}, timeout=60)
    assert answer["meta_info"]["completion_tokens"] == 3
    assert (server.engine_gpu_counts, server.engine_gpu_offsets, server.num_new_engines) == ([1], [0], 1)
    assert server.engine_parallel_configs == [{"tp_size": 1, "pp_size": 1, "dp_size": 1, "ep_size": 1}]


def _check_seeds_repeat(url: str) -> None:
    """A request's sampling seed gives the same tokens alone and among others."""

    async def sample(seed: int) -> list[int]:
        sampling = {"max_new_tokens": 12, "temperature": 1.0, "ignore_eos": True, "sampling_seed": seed}
        return (await post(url, {"input_ids": [5, 6, 7], "sampling_params": sampling}))["output_ids"]

    async def run() -> tuple[list[list[int]], list[list[int]]]:
        alone = [await sample(seed) for seed in range(6)]
        together = await asyncio.gather(*(sample(seed) for seed in range(6)))
        await close_client()
        return alone, together

    alone, together = asyncio.run(run())
    assert alone == together
    assert len({tuple(tokens) for tokens in alone}) == 6


def test_an_engine_that_dies_while_starting_shows_its_log_at_once(placement: Placement, tmp_path: Path) -> None:
    from slime.backends.sglang_utils.server_process import ServerStartError

    args = arguments(tmp_path / "no-such-model", tmp_path)
    (server,) = start_rollout_servers(args, placement).values()
    with pytest.raises(ServerStartError) as caught:
        server.wait_ready()
    message = str(caught.value)
    assert (
        "ended while starting" in message
    )  # and not: is not ready after so many seconds and f"{tmp_path}/sglang-0-" in message
    assert "no-such-model" in message.partition("last lines")[2]
    assert server.all_engines == [None]


def test_no_engines_with_a_router_alone(placement: Placement, tmp_path: Path) -> None:
    """P6: --rollout-num-gpus 0."""
    args = arguments("m", tmp_path, rollout_num_gpus=0)
    (server,) = start_rollout_servers(args, placement).values()
    server.wait_ready()
    assert server.engines == [] and args.sglang_router_port is not None
    server.shutdown()


def test_nothing_is_started_without_rollouts(placement: Placement, tmp_path: Path) -> None:
    assert start_rollout_servers(arguments("m", tmp_path, debug_train_only=True), placement) == {}


def test_more_engines_than_devices_are_refused(placement: Placement, tmp_path: Path) -> None:
    args = arguments("m", tmp_path, rollout_num_gpus=2)
    with pytest.raises(ValueError, match="devices 0 to 1 of the rollout devices, but there are 1"):
        start_rollout_servers(args, placement)
