"""Which servers a configuration asks for: the YAML of models and groups, prefill and decode, places and ranks."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime.backends.sglang_utils.server_args import EngineAddress, EngineShape, compute_layers
from slime.backends.sglang_utils.sglang_config import SglangConfig
from slime.ray.engine_group import GroupOffset, make_groups
from slime.ray.placement_group import Placement
from slime.ray.server_group import ServerGroup
from slime.utils.http_utils import get_rollout_num_engines
from tests.support.base_config import BaseConfig

THREE_MODELS = """
sglang:
  - name: actor
    num_gpus_per_engine: 1
    server_groups:
      - {num_gpus: 2, overrides: {mem_fraction_static: 0.7}}
      - {worker_type: placeholder, num_gpus: 1}
      - {num_gpus: 4, num_gpus_per_engine: 2}
  - name: reference
    update_weights: false
    server_groups: [{num_gpus: 1}]
  - name: reward
    model_path: /models/reward
    engine_groups: [{num_gpus: 2, num_gpus_per_engine: 2, worker_type: regular}]
"""

ONE = "{name: a, server_groups: [{num_gpus: 1}]}"


@pytest.fixture
def base(tmp_path: Path) -> BaseConfig:
    made = BaseConfig(tmp_path)
    del made.flags["--colocate"]
    return made


def refused(base: BaseConfig, capsys: pytest.CaptureFixture[str], *words: Any) -> str:
    with pytest.raises(SystemExit) as end:
        base.parse(*words)
    assert end.value.code == 2
    return capsys.readouterr().err


def groups_of(args: Namespace) -> list[ServerGroup]:
    devices = list(range(args.rollout_num_gpus))
    placement = Placement(None, devices, devices)
    offset, made = GroupOffset(), []
    for model in SglangConfig.from_args(args).models:
        groups, offset = make_groups(args, placement, model, None, offset)  # type: ignore[arg-type]
        made += groups
    return made


def test_models_and_groups_of_the_yaml(base: BaseConfig) -> None:
    """Several models: defaults, an alias, and how many devices and engines follow."""
    args = base.parse("--sglang-config", base.write("serve.yaml", THREE_MODELS))
    actor, reference, reward = SglangConfig.from_args(args).models
    assert args.rollout_num_gpus == 10 and get_rollout_num_engines(args) == 4
    assert (actor.update_weights, reference.update_weights, reward.update_weights) == (True, False, False)
    assert actor.model_path == reference.model_path == args.hf_checkpoint != reward.model_path
    assert [group.num_gpus_per_engine for group in actor.server_groups] == [1, 1, 2]
    assert actor.server_groups[0].overrides == {"mem_fraction_static": 0.7}


def test_the_default_rollout_samples_from_the_trained_model(base: BaseConfig) -> None:
    first = ONE.replace("name: a", "name: judge, model_path: /m")
    args = base.parse("--sglang-config", base.write("serve.yaml", f"sglang: [{first}, {ONE}]"))
    config = SglangConfig.from_args(args)
    assert config.main_model.name == "a" and config.models[0].name == "judge"


def test_groups_take_consecutive_devices(base: BaseConfig) -> None:
    """A placeholder takes devices but no ranks, and overrides reach their group alone."""
    args = base.parse("--sglang-config", base.write("serve.yaml", THREE_MODELS))
    groups = groups_of(args)
    assert [(group.rank_offset, group.gpu_offset, group.num_engines) for group in groups] == [
        (0, 0, 2), (2, 3, 2), (4, 7, 1), (5, 8, 1),
    ]  # fmt: skip
    second = groups[1].actor_settings(1)
    assert (second["rank"], second["base_gpu_id"], second["num_gpus_per_engine"]) == (3, 5, 2)
    assert [group.actor_settings(0)["sglang_overrides"].get("mem_fraction_static") for group in groups] == [
        0.7, None, None, None,
    ]  # fmt: skip
    assert groups[3].actor_settings(0)["sglang_overrides"]["model_path"] == "/models/reward"


def test_node_ranks_do_not_depend_on_the_rank_of_the_run(base: BaseConfig) -> None:
    """An engine over two nodes comes after one on one node: its node ranks are 0 and 1, though its ranks are 1, 2."""
    text = """
    sglang:
      - name: actor
        server_groups: [{num_gpus: 2, num_gpus_per_engine: 2}, {num_gpus: 8, num_gpus_per_engine: 4}]
    """
    args = base.parse("--sglang-config", base.write("serve.yaml", text), "--num-gpus-per-node", 2)
    small, large = groups_of(args)
    settings = [large.actor_settings(index) for index in range(4)]
    assert len(small.all_engines) == 1 and large.num_engines == 2
    assert [setting["rank"] for setting in settings] == [1, 2, 3, 4]
    assert [(setting["nnodes"], setting["node_rank"]) for setting in settings] == [(2, 0), (2, 1), (2, 0), (2, 1)]
    assert [setting["base_gpu_id"] for setting in settings] == [2, 4, 6, 8]


def test_frozen_models_that_sleep_keep_a_copy_of_their_weights(base: BaseConfig) -> None:
    text = """
    sglang:
      - {name: actor, server_groups: [{num_gpus: 1}]}
      - {name: frozen, model_path: /m, server_groups: [{num_gpus: 1}, {num_gpus: 1}]}
    """
    args = base.parse(
        "--sglang-config", base.write("serve.yaml", text), "--colocate", "--actor-num-gpus-per-node", 2,
        "--rollout-num-gpus", 3,
    )  # fmt: skip
    overrides = [group.actor_settings(0)["sglang_overrides"] for group in groups_of(args)]
    assert overrides == [
        {"model_path": args.hf_checkpoint},
        {"model_path": "/m", "enable_weights_cpu_backup": True},
        {"model_path": "/m", "enable_memory_saver": False},
    ]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("sglang: [{name: a, server_groups: [{num_gpu: 1}]}]", "unknown key 'num_gpu' (did you mean num_gpus"),
        ("sglang: [{name: a, server_groups: [{num_gpus: 3, num_gpus_per_engine: 2}]}]", "3 devices can't be divided"),
        ("sglang: [{name: a, server_groups: [{num_gpus: 1, worker_type: prefil}]}]", "'prefil' is not one of"),
        ("sglang: [{name: a, server_groups: [{num_gpus: true}]}]", "num_gpus must be of type int, not True"),
        ("sglang: [{name: a, server_groups: [{num_gpus: 2, worker_type: decode}]}]", "decode engines but no prefill"),
        ("sglang: [{name: a}]", "model 'a': has no server_groups"),
        ("sglang: [{server_groups: [{num_gpus: 1}]}]", "model 0: has no name"),
        ("sglang: [{name: a, server_groups: [{num_gpus: 1, worker_type: placeholder}]}]", "has placeholders only"),
        ("sglang: []", "must list at least one model"),
        ("sglan: []", "unknown key 'sglan' (did you mean sglang"),
        (f"sglang: [{ONE}, {ONE.replace('name: a', 'name: a, model_path: /m')}]", "2 models are named 'a'"),
        (f"sglang: [{ONE}, {ONE.replace('name: a', 'name: b')}]", "models a and b would all receive the trained"),
        (f"sglang: [{ONE.replace('name: a', 'name: a, model_path: /m')}]", "no model receives the trained weights"),
        (
            "sglang: [{name: a, server_groups: [{num_gpus: 1, overrides: {mem_fraction_statik: 0.5}}]}]",
            "no field 'mem_fraction_statik' (did you mean mem_fraction_static",
        ),
        (
            "sglang: [{name: a, server_groups: [{num_gpus: 1, overrides: {model_path: /x}}]}]",
            "but a group overrides it with /x",
        ),
    ],
)  # fmt: skip
def test_broken_files_are_refused(base: BaseConfig, capsys: pytest.CaptureFixture[str], text: str, part: str) -> None:
    error = refused(base, capsys, "--sglang-config", base.write("serve.yaml", text))
    assert part in error and "serve.yaml" in error


@pytest.mark.parametrize("mode", [[], ["--colocate"], ["--debug-rollout-only"]])
def test_the_file_says_how_many_devices_there_are(base: BaseConfig, mode: list[str]) -> None:
    path = base.write("serve.yaml", "sglang: [{name: a, server_groups: [{num_gpus: 3}]}]")
    assert base.parse("--sglang-config", path, *mode).rollout_num_gpus == 3


def test_devices_must_add_up(base: BaseConfig, capsys: pytest.CaptureFixture[str]) -> None:
    path = base.write("serve.yaml", "sglang: [{name: a, server_groups: [{num_gpus: 3}]}]")
    error = refused(base, capsys, "--sglang-config", path, "--rollout-num-gpus", 4)
    assert f"--sglang-config {path}" in error and "on 3 devices" in error and "--rollout-num-gpus 4" in error


def test_prefill_and_decode_engines(base: BaseConfig) -> None:
    """--prefill-num-servers: how the devices are shared, and what each server is told."""
    args = base.parse(
        "--prefill-num-servers", 1, "--rollout-num-gpus", 6, "--rollout-num-gpus-per-engine", 2
    )  # fmt: skip
    config = SglangConfig.from_args(args)
    assert config.has_pd_disaggregation
    assert [(group.worker_type, group.num_gpus) for group in config.main_model.server_groups] == [
        ("prefill", 2), ("decode", 4),
    ]  # fmt: skip
    for group in groups_of(args):
        settings = group.actor_settings(0)
        shape = EngineShape(2, base_gpu_id=settings["base_gpu_id"], worker_type=settings["worker_type"])
        fixed = compute_layers(args, 0, shape, EngineAddress("h", 1, 2, bootstrap_port=3), {}).fixed
        assert fixed["disaggregation_mode"] == group.config.worker_type
        assert fixed.get("disaggregation_bootstrap_port") == (3 if group.config.worker_type == "prefill" else None)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--prefill-num-servers", 2, "--rollout-num-gpus", 2], "leaves none of --rollout-num-gpus 2 to decode"),
        (["--prefill-num-servers", 1], "--rollout-num-gpus is needed"),
        (
            ["--prefill-num-servers", 1, "--rollout-num-gpus", 2, "--use-slime-router"],
            "--use-slime-router can't bring prefill and decode engines together",
        ),
        (
            ["--rollout-num-gpus", 1, "--use-slime-router", "--router-policy", "manual"],
            "--router-policy manual is sglang-router's",
        ),
        (["--rollout-num-gpus", 1, "--slime-router-middleware-paths", "a.b"], "needs --use-slime-router"),
    ],
)  # fmt: skip
def test_flags_that_do_not_fit(
    base: BaseConfig, capsys: pytest.CaptureFixture[str], words: list[Any], part: str
) -> None:
    assert part in refused(base, capsys, *words)


def test_encoders_serve_images_to_the_engines_of_a_frozen_model(
    base: BaseConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    groups = "server_groups: [{num_gpus: 1, worker_type: encoder}, {num_gpus: 1}]"
    text = f"sglang: [{{name: actor, server_groups: [{{num_gpus: 1}}]}}, {{name: vlm, model_path: /m, {groups}}}]"
    args = base.parse("--sglang-config", base.write("serve.yaml", text))
    actor, encoder, language = groups_of(args)
    for group in (actor, encoder, language):
        group.encoder_urls = ["http://e:1"]
    language_only = language.actor_settings(0)["sglang_overrides"]
    assert (language_only["language_only"], language_only["encoder_urls"]) == (True, ["http://e:1"])
    assert "encoder_urls" not in encoder.actor_settings(0)["sglang_overrides"]
    fixed = compute_layers(args, 0, EngineShape(1, worker_type="encoder"), EngineAddress("h", 1, 2), {}).fixed
    assert fixed["encoder_only"] is True
    trained = f"sglang: [{{name: actor, {groups}}}]"
    assert "can send no weights" in refused(base, capsys, "--sglang-config", base.write("trained.yaml", trained))
