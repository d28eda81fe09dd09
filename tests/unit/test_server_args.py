"""An engine's settings: which source wins, and what may not be set."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from slime.backends.sglang_utils.server_args import (
    EngineAddress,
    EngineShape,
    ServerArgsError,
    ServerArgsLayers,
    compute_layers,
    merge_layers,
    server_flags,
)

DEFAULTS = {
    "attention_backend": None,
    "dtype": "auto",
    "enable_metrics": False,
    "host": "127.0.0.1",
    "mem_fraction_static": None,
    "port": 30000,
}


def layers(**given: dict[str, Any]) -> ServerArgsLayers:
    return ServerArgsLayers(**{"device": {}, "fixed": {}, "flags": {}, "overrides": {}, "owned": {}, **given})


def arguments(**given: Any) -> Namespace:
    return Namespace(**{"hf_checkpoint": "/models/m", "seed": 7, "offload_rollout": True, **given})


def computed(
    shape: EngineShape, address: EngineAddress | None = None, rank: int = 0, **given: Any
) -> ServerArgsLayers:
    address = address or EngineAddress("10.0.0.1", 15000, 15001)
    return compute_layers(arguments(**given), rank, shape, address, {"device": "cpu"})


def test_precedence_device_fixed_flags_overrides() -> None:
    name = "attention_backend"
    merged = merge_layers(layers(device={name: "a"}, fixed={"enable_metrics": True}), DEFAULTS)
    assert merged == {name: "a", "enable_metrics": True}
    assert merge_layers(layers(device={name: "a"}, fixed={name: "b"}), DEFAULTS)[name] == "b"
    assert merge_layers(layers(device={name: "a"}, fixed={name: "b"}, flags={name: "c"}), DEFAULTS)[name] == "c"
    assert merge_layers(layers(fixed={name: "b"}, flags={name: "c"}, overrides={name: "d"}), DEFAULTS)[name] == "d"


def test_a_flag_at_its_default_was_not_given() -> None:
    merged = merge_layers(layers(device={"dtype": "float32"}, flags={"dtype": "auto"}), DEFAULTS)
    assert merged == {"dtype": "float32"}


@pytest.mark.parametrize("source", ["flags", "overrides"])
def test_what_slime_works_out_may_be_repeated_but_not_contradicted(source: str) -> None:
    assert merge_layers(layers(owned={"port": 1}, **{source: {"port": 1}}), DEFAULTS) == {"port": 1}
    with pytest.raises(ServerArgsError, match="port=2: slime sets it to 1"):
        merge_layers(layers(owned={"port": 1}, **{source: {"port": 2}}), DEFAULTS)


@pytest.mark.parametrize("source", ["flags", "overrides"])
def test_an_unknown_name_is_an_error_with_the_nearest(source: str) -> None:
    with pytest.raises(ServerArgsError, match=r"mem_fraction_statc.*did you mean mem_fraction_static"):
        merge_layers(layers(**{source: {"mem_fraction_statc": 0.5}}), DEFAULTS)


def test_flags_of_slime_itself_are_no_server_settings() -> None:
    args = Namespace(
        sglang_router_ip="x", sglang_server_concurrency=4, sglang_dtype="float16", sglang_model_routers={}, seed=1
    )
    assert server_flags(args) == {"dtype": "float16"}


@pytest.mark.parametrize("given", [{"sglang_dp_size": 2}, {"sglang_data_parallel_size": 2}])
def test_either_name_of_a_parallel_size(given: dict[str, int]) -> None:
    assert server_flags(Namespace(**given)) == {"dp_size": 2}
    assert server_flags(Namespace(sglang_dp_size=2, sglang_data_parallel_size=1)) == {"dp_size": 2}


def test_layout_and_addresses() -> None:
    shape = EngineShape(num_gpus=8, nnodes=2, node_rank=1, base_gpu_id=4)
    found = computed(shape, EngineAddress("::1", 15000, 15001, dist_init_addr="[::1]:15010"), sglang_pp_size=2)
    assert found.owned == {
        "host": "::1",
        "port": 15000,
        "nccl_port": 15001,
        "dist_init_addr": "[::1]:15010",
        "nnodes": 2,
        "node_rank": 1,
        "base_gpu_id": 4,
        "gpu_id_step": 1,
        "tp_size": 4,
        "pp_size": 2,
    }
    assert not {"tp_size", "pp_size"} & found.flags.keys()


def test_pipeline_size_must_divide_the_engine() -> None:
    with pytest.raises(ServerArgsError, match="3 devices can't have --sglang-pp-size 2"):
        computed(EngineShape(num_gpus=3), sglang_pp_size=2)


def test_engines_sample_with_different_seeds() -> None:
    seeds = [computed(EngineShape(1), rank=rank).fixed["random_seed"] for rank in range(3)]
    assert seeds == [7, 8, 9]


def test_memory_saver_follows_offloading() -> None:
    assert computed(EngineShape(1)).fixed["enable_memory_saver"] is True
    assert computed(EngineShape(1), offload_rollout=False).fixed["enable_memory_saver"] is False


def test_dtype_is_the_trainers_where_the_device_has_one() -> None:
    address = EngineAddress("h", 1, 2)

    def dtype(device: dict[str, Any], **given: Any) -> str | None:
        return compute_layers(arguments(**given), 0, EngineShape(1), address, device).fixed.get("dtype")

    assert dtype({"dtype": "float32"}, params_dtype="bfloat16") == "bfloat16"
    assert dtype({}, params_dtype="bfloat16") is None
    assert dtype({}, fp16=True) == "float16"


def test_prefill_engines_have_a_bootstrap_port() -> None:
    address = EngineAddress("h", 1, 2, bootstrap_port=3)
    fixed = computed(EngineShape(1, worker_type="prefill"), address).fixed
    assert (fixed["disaggregation_mode"], fixed["disaggregation_bootstrap_port"]) == ("prefill", 3)
    assert "disaggregation_mode" not in computed(EngineShape(1)).fixed
