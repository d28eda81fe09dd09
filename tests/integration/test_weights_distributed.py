"""Real servers get the weights of trainers of several layouts: by broadcast, disk and delta, and colocated."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from tiny_hf import make_model

from slime.ray.utils import Lock
from tests.support.attached_engine import AttachedEngine
from tests.support.engine import SGLangServer, start_server
from tests.support.gloo_world import GlooWorld

NAMESPACE = "distributed-weights"  # of the scenarios, which import Megatron
START_SECONDS = 400.0
SECONDS = 120.0
TP2 = "--tensor-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
PP2_UNEVEN = f"{PP2} --decoder-first-pipeline-num-layers 1"
EP2 = "--expert-model-parallel-size 2"


@pytest.fixture(scope="module")
def context(
    ray_cluster: str, sglang_server: SGLangServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Any]]:
    """Engines as named actors: `dense` and the tensor-parallel `dense_tp2` of one model, and `moe`."""
    import ray

    root = tmp_path_factory.mktemp("distributed")
    moe = make_model("qwen3_moe", root / "qwen3_moe")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (moe / name).write_bytes((sglang_server.model_dir / name).read_bytes())
    servers = [
        start_server(sglang_server.model_dir, root / "dense_tp2.log", num_gpus=2),
        start_server(moe, root / "moe.log"),
    ]
    urls = {"dense": sglang_server.url, "dense_tp2": servers[0].url, "moe": servers[1].url}
    sizes = {"dense": 1, "dense_tp2": 2, "moe": 1}
    options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 8, "namespace": NAMESPACE}
    actors = [ray.remote(Lock).options(name="lock", num_cpus=0, namespace=options["namespace"]).remote()]
    actors += [
        ray.remote(AttachedEngine).options(name=name, **options).remote(url, sizes[name]) for name, url in urls.items()
    ]
    try:
        for server in servers:
            server.wait_ready(START_SECONDS)
        yield {
            "address": ray_cluster,
            "out": str(root / "out"),
            "sizes": sizes,
            "urls": urls,
            "dense": str(sglang_server.model_dir),
            "moe": str(moe),
        }
    finally:
        for server in servers:
            server.stop()
        for actor in actors:
            ray.kill(actor)
        body = {"model_path": str(sglang_server.model_dir), "weight_version": "default"}
        sglang_server.client.post("/continue_generation", timeout=SECONDS)
        sglang_server.client.post("/update_weights_from_disk", body, timeout=SECONDS)


@pytest.fixture(scope="module")
def trainers(context: dict[str, Any]) -> Iterator[GlooWorld]:
    with GlooWorld(2) as world:
        yield world


@pytest.mark.parametrize(
    ("model", "flags", "engines", "sleeps"),
    [
        ("dense", TP2, ["dense"], False),
        ("dense", PP2_UNEVEN, ["dense", "dense_tp2"], False),
        ("moe", EP2, ["moe"], True),
        ("moe", PP2, ["moe"], False),
    ],
    ids=["tp2", "pp2_two_engines", "moe_ep2_sleeping", "moe_pp2"],
)
def test_engines_have_the_trainers_weights(
    trainers: GlooWorld, context: dict[str, Any], model: str, flags: str, engines: list[str], sleeps: bool
) -> None:
    """Bit for bit, on every rank of every engine, and under the update's version."""
    import distributed_scenarios

    versions = trainers.run(distributed_scenarios.send_twice, context, model, flags, engines, sleeps)
    assert versions == [["2"] * len(engines)] * 2


def test_a_colocated_engine_has_the_trainers_weights(trainers: GlooWorld, context: dict[str, Any]) -> None:
    """Bit for bit, on both of its ranks, bucket after bucket in the same memory. One that it refuses ends the update
    on every rank, and the next one repairs all."""
    import distributed_scenarios

    for message, versions in trainers.run(distributed_scenarios.send_by_tensor, context):
        assert re.search("update_weights_from_tensor: status 400: .*begin_weight_update", message), message
        assert versions == ["3"]


@pytest.mark.parametrize(
    ("model", "flags", "engines", "route"),
    [
        ("dense", TP2, ["dense", "dense_tp2"], "disk"),
        ("dense", PP2_UNEVEN, ["dense", "dense_tp2"], "delta"),
        ("moe", PP2, ["moe"], "disk"),
        ("moe", EP2, ["moe"], "delta"),
    ],
    ids=["disk_tp2", "delta_pp2", "disk_moe_pp2", "delta_moe_ep2"],
)
def test_engines_have_the_trainers_weights_by_disk(
    trainers: GlooWorld, context: dict[str, Any], model: str, flags: str, engines: list[str], route: str
) -> None:
    """Bit for bit; with delta two engines share a host's checkpoint."""
    import distributed_scenarios

    versions = trainers.run(distributed_scenarios.send_by_disk, context, model, flags, engines, route)
    assert versions == [["3"] * len(engines)] * 2


@pytest.mark.parametrize(
    ("fault", "flags", "text"),
    [
        ("refuse", PP2_UNEVEN, "update_weights_from_distributed: status 400: .*must run between begin_weight_update"),
        ("hang", TP2, "a bucket of weights over slime-pp_0.* had not finished after 2 s"),
    ],
)
def test_an_engine_that_does_not_take_weights(
    trainers: GlooWorld, context: dict[str, Any], fault: str, flags: str, text: str
) -> None:
    """The sender isn't left in a broadcast, nor is the other engine; every rank has the server's words; the next
    update repairs all; then the engines change."""
    import distributed_scenarios

    answers = trainers.run(distributed_scenarios.fail_and_repair, context, flags, ["dense", "dense_tp2"], fault)
    for message, seconds in answers:
        assert re.search(text, message), message
        assert seconds < 15.0


@pytest.mark.parametrize(
    ("mode", "route"), [("retract", "broadcast"), ("in_place", "broadcast"), ("in_place", "disk")]
)
def test_a_request_goes_on_with_the_new_weights(
    trainers: GlooWorld, context: dict[str, Any], mode: str, route: str
) -> None:
    """It is not cut off, and says which of its tokens which weights made."""
    import distributed_scenarios

    meta, _ = trainers.run(distributed_scenarios.send_while_generating, context, mode, route)
    assert meta["finish_reason"]["type"] == "length" and meta["completion_tokens"] == 400
    assert [part["version"] for part in meta["weight_versions"]] == ["1", "2"], meta
