"""Updates by way of a folder: what trainers write, hosts take and engines are told to load, and all that can fail.

With real servers: test_weights_distributed.py.
"""

from __future__ import annotations

import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_hf import make_model

from slime.utils.checkpoint_folder import STATE_FILE, WeightsId, version_folder
from tests.support.folder_engine import FolderEngine, Handle, results_of
from tests.support.gloo_world import GlooWorld

TP2 = "--tensor-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
EP2 = "--expert-model-parallel-size 2"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {name: str(make_model(name, root / name)) for name in ("qwen3", "qwen3_moe")}


@pytest.fixture(scope="module")
def trainers(gloo_world: Callable[[int], GlooWorld]) -> GlooWorld:
    return gloo_world(2)


@pytest.mark.parametrize(
    ("model", "flags", "local"), [("qwen3", TP2, False), ("qwen3_moe", EP2, True)], ids=["dense", "moe_local"]
)
def test_engines_load_what_trainers_wrote(
    trainers: GlooWorld, models: dict[str, str], tmp_path: Path, model: str, flags: str, local: bool
) -> None:
    import disk_scenarios

    calls, _ = trainers.run(disk_scenarios.send_full, models[model], str(tmp_path), flags, local)
    assert calls == [
        "/pause_generation",
        "/flush_cache",
        "/update_weights_from_disk",
        "/update_weight_version",
        "/continue_generation",
    ]


@pytest.mark.parametrize(
    ("model", "flags", "encoding"),
    [("qwen3", PP2, "xor"), ("qwen3_moe", EP2, "overwrite")],
    ids=["dense_xor", "moe_overwrite"],
)
def test_deltas(
    trainers: GlooWorld, models: dict[str, str], tmp_path: Path, model: str, flags: str, encoding: str
) -> None:
    """The first update of a run that resumes brings the loaded weights, not those of --hf-checkpoint; a host without
    the state before gets all."""
    import disk_scenarios

    metrics, nothing = trainers.run(disk_scenarios.send_deltas, models[model], str(tmp_path), flags, encoding)
    assert nothing == [{}] * 5
    density = [entry["update_weights_density"] for entry in metrics]
    size = [entry["update_weights_wire_bytes"] for entry in metrics]
    assert density[0] == density[3] == 1.0 and density[2] == 0.0
    assert 0 < density[1] < 0.05 and 0 < density[4] < 0.05
    assert size[2] < size[1] < 0.3 * size[0] and size[4] < 0.3 * size[0]


def test_an_engine_on_two_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both pull; they hold weights together or none."""
    monkeypatch.setattr("slime.backends.sglang_utils.engine_weights.get_all", results_of)
    source = version_folder(tmp_path / "shared", 1)
    source.mkdir(parents=True)
    save_file({"a": np.ones(3)}, source / "model.safetensors")
    (source / STATE_FILE).write_text('{"version": 1, "id": "x"}')
    hosts = [tmp_path / "first", tmp_path / "second"]
    first, second = (
        FolderEngine(Namespace(update_weight_disk_dir=tmp_path / "shared", update_weight_local_checkpoint_dir=host))
        for host in hosts
    )
    first.set_other_nodes([Handle(second)])
    assert first.get_pulled_weights() is None
    first.pull_weights(1)
    assert first.get_pulled_weights() == second.get_pulled_weights() == WeightsId(1, "x")
    shutil.rmtree(hosts[1])
    assert first.get_pulled_weights() is None


@pytest.mark.parametrize("mode", ["full", "delta"])
def test_a_full_disk(trainers: GlooWorld, models: dict[str, str], tmp_path: Path, mode: str) -> None:
    """Every rank has the words of the one that could not write, the engine goes on with what it has, nothing is left
    in the folder, and the next update brings everything."""
    import disk_scenarios

    for message, calls in trainers.run(disk_scenarios.fail_to_write, models["qwen3"], str(tmp_path), mode):
        assert "trainer rank 1: OSError: [Errno 28] No space left on device" in message
        assert calls == []


@pytest.mark.parametrize("mode", ["full", "delta"])
def test_a_file_that_is_missing(trainers: GlooWorld, models: dict[str, str], tmp_path: Path, mode: str) -> None:
    import disk_scenarios

    for message, calls in trainers.run(disk_scenarios.lose_a_file, models["qwen3"], str(tmp_path), mode):
        assert "DamagedCheckpoint" in message and "weight_v000002/model-0000" in message
        assert "No such file" in message
        assert calls == []
