"""YAML files: the same names, types and checks as flags."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.utils.arguments.errors import ConfigError
from slime.utils.arguments.settings import Settings
from slime.utils.arguments.table import flag_table
from slime.utils.arguments.yaml_config import merge_yaml_files, read_yaml_settings


def read(tmp_path: Path, text: str) -> dict:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return read_yaml_settings(str(path), flag_table()).values


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("use_kl_loss: true", {"use_kl_loss": True}),
        ("use-kl-loss: false", {"use_kl_loss": False}),
        ("lr: 1e-6", {"lr": 1e-6}),
        ("lr: 1", {"lr": 1.0}),
        ("rollout_stop: END", {"rollout_stop": ["END"]}),
        ("rollout_stop_token_ids: [1, 2]", {"rollout_stop_token_ids": [1, 2]}),
        ("moe_layer_freq: ([0]*1+[1]*2)", {"moe_layer_freq": [0, 1, 1]}),
        (
            "apply_chat_template_kwargs: {enable_thinking: false}",
            {"apply_chat_template_kwargs": {"enable_thinking": False}},
        ),
        ("load: null", {"load": None}),
        ("custom: {max_turns: 5}", {"max_turns": 5}),
        ("", {}),
    ],
)
def test_values(tmp_path: Path, text: str, expected: dict) -> None:
    """P3: a file can turn a bool on and off."""
    assert read(tmp_path, text) == expected


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("rollout_batch_sise: 1", "unknown key 'rollout_batch_sise' (did you mean rollout_batch_size"),
        ("use_kl_loss: 'yes'", "use_kl_loss must be true or false"),
        ("rollout_batch_size: many", "'many' is not"),
        ("rollout_batch_size: true", "takes a number"),
        ("rollout_batch_size: 1.5", "'1.5' is not"),
        ("label_key: 7", "put 7 in quotes"),
        ("kl_loss_type: k9", "'k9' is not one of k1, k2, k3, low_var_kl"),
        ("colocate: null", "can't be null"),
        ("custom: {lr: 1}", "custom.lr is a setting of slime"),
        ("- 1", "must hold a mapping"),
        ("a: [", "is not YAML"),
        ("config: x.yaml", "can't be set in a file"),
    ],
)
def test_problems_name_file_and_key(tmp_path: Path, text: str, part: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(tmp_path, text)
    assert part in str(error.value)
    assert "c.yaml" in str(error.value)


def test_command_line_wins(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("lr: 1.0e-5\nseed: 7")
    given = Settings()
    given.set("config", str(path), "--config")
    given.set("lr", 1e-6, "--lr")
    merged = merge_yaml_files(given, flag_table())
    assert merged.values["lr"] == 1e-6
    assert merged.values["seed"] == 7
    assert merged.origin["seed"] == f"{path}: seed"


def test_two_files_must_not_disagree(tmp_path: Path) -> None:
    given = Settings()
    for dest, text in (("config", "seed: 1"), ("custom_config_path", "seed: 2")):
        (tmp_path / dest).write_text(text)
        given.set(dest, str(tmp_path / dest), f"--{dest}")
    with pytest.raises(ConfigError, match=r"config: seed is 1, .*custom_config_path: seed is 2"):
        merge_yaml_files(given, flag_table())


def test_missing_file() -> None:
    given = Settings()
    given.set("config", "/nowhere.yaml", "--config")
    with pytest.raises(ConfigError, match=r"no such file: /nowhere\.yaml"):
        merge_yaml_files(given, flag_table())
