"""scripts/run-*.sh: each parses, with the flags of its model and on the cluster that it is written for."""

from __future__ import annotations

import json
import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.model_configs import PUBLISHED, write_model_folder

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPTS = {path.stem.removeprefix("run-"): path for path in sorted((REPOSITORY / "scripts").glob("run-*.sh"))}
del SCRIPTS["smollm2-135M"]  # makes its model and data itself, for one CPU
# billions of parameters, as in the models' names
BILLIONS = {
    "qwen2.5-0.5B": 0.49,
    "qwen3-4B": 4.0,
    "llama3.1-8B-Instruct": 8.0,
    "qwen2.5-32B": 32.8,
    "qwen3.5-27B": 26.9,
    "qwen3-next-80B-A3B": 79.7,
    "minimax-m2": 228.7,
    "mimo-7B-rl": 7.83,
    "glm4-9B": 9.4,
    "glm4.5-106B-A12B": 106.9,
    "glm4.5-355B-A32B": 353.0,
    "moonlight": 16.0,
    "deepseek-v3": 671.0,
    "kimi-k2": 1026.0,
}
NODES = {
    "qwen2.5-32B": 2,
    "qwen3-32B": 2,
    "qwen3-235B-A22B": 8,
    "qwen3-next-80B-A3B": 4,
    "qwen3.5-27B": 2,
    "minimax-m2": 8,
    "glm4-32B": 2,
    "glm4.5-106B-A12B": 8,
    "glm4.5-355B-A32B": 16,
    "deepseek-v3": 16,
    "kimi-k2": 32,
    "kimi-k2-thinking": 32,
}


def run_script(name: str, folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the script as its user does, in a folder with the model's config.json and one prompt."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text('{"prompt": "1+1=", "label": "2"}\n')
    settings = {
        "HF_CHECKPOINT": str(write_model_folder(name, folder / name)),
        "PROMPT_DATA": str(prompts),
        "EVAL_DATA": str(prompts),
        "SAVE_DIR": str(folder / "save"),
        "SLIME_ACCELERATOR": "cpu",
    }
    kept = {key: value for key, value in os.environ.items() if key not in ("RAY_ADDRESS", "WANDB_PROJECT")}
    return subprocess.run(
        ["bash", str(SCRIPTS[name]), *words],
        env={**kept, **settings, **env},
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
    )


@pytest.fixture(scope="module")
def dry_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, subprocess.CompletedProcess[str]]:
    folders = {name: tmp_path_factory.mktemp("run") for name in SCRIPTS}
    with ThreadPoolExecutor(2) as pool:
        return dict(
            zip(
                SCRIPTS, pool.map(lambda name: run_script(name, folders[name], "--dry-run=json"), SCRIPTS), strict=True
            )
        )


def parsed(dry_runs: dict[str, subprocess.CompletedProcess[str]], name: str) -> dict[str, Any]:
    result = dry_runs[name]
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_every_model_script_has_a_run_script() -> None:
    models = {path.stem for path in (REPOSITORY / "scripts" / "models").glob("*.sh")}
    assert models <= set(PUBLISHED), "add the published sizes of new models to tests/support/model_configs.py"
    assert set(SCRIPTS) == models


@pytest.mark.parametrize("name", SCRIPTS)
def test_dry_run(dry_runs: dict[str, subprocess.CompletedProcess[str]], name: str) -> None:
    """Every flag is known, the architecture is that of the published config.json, and everything divides."""
    content = parsed(dry_runs, name)
    assert content["settings"]["num_layers"] == PUBLISHED[name].layers
    assert len(content["placement"]) == 8 * NODES.get(name, 1)
    assert all(device["trainer"] and device["engine"] for device in content["placement"])
    assert content["batches"]["steps_per_rollout"] == 1
    given = content["origins"]
    for flag in ("num_layers", "hidden_size", "swiglu", "hf_checkpoint", "eval_prompt_data", "save_interval"):
        assert given[flag].startswith("--"), flag


@pytest.mark.parametrize("name", BILLIONS)
def test_sizes(dry_runs: dict[str, subprocess.CompletedProcess[str]], name: str) -> None:
    """The engine's weights in float32, all devices together, are the model's size (vocabulary without padding)."""
    content = parsed(dry_runs, name)
    devices = content["settings"]["rollout_num_gpus_per_engine"]
    size = content["memory"]["engine"]["weights"] * devices / 4 / 1e9
    assert size == pytest.approx(BILLIONS[name], rel=0.02)


def test_users_flags_win(tmp_path: Path) -> None:
    words = ("--lr", "0.5", "--rollout-batch-size", "64", "--num-steps-per-rollout", "2", "--dry-run=json")
    result = run_script("qwen3-0.6B", tmp_path, *words, GPUS_PER_NODE="2", EVAL_DATA="")
    assert result.returncode == 0, result.stderr
    content = json.loads(result.stdout)
    assert content["settings"]["lr"] == 0.5
    assert len(content["placement"]) == 2
    assert content["settings"]["eval_interval"] is None


def test_a_model_that_is_another_is_refused(tmp_path: Path) -> None:
    wrong = write_model_folder("qwen3-8B", tmp_path / "other")
    result = run_script("qwen3-4B", tmp_path, "--dry-run", HF_CHECKPOINT=str(wrong))
    assert result.returncode == 2
    assert "--hidden-size 2560 does not match" in result.stderr


@pytest.mark.parametrize("path", sorted((REPOSITORY / "scripts").rglob("*.sh")), ids=lambda path: path.name)
def test_no_script_kills_by_name(path: Path) -> None:
    """Processes of others, on this machine or in this cluster, are nobody's to end; `ray stop` ends a cluster."""
    text = path.read_text()
    assert not re.search(r"\b(pkill|killall|fuser)\b|\bray stop\b|\bkill\b", text)
    subprocess.run(["bash", "-n", str(path)], check=True)
