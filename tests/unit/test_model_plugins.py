"""A model family from outside: a module in a `slime_plugins/models` folder on the Python path."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PLUGIN = """
from slime.backends.megatron_utils.families.blocks import ATTENTION, DENSE_MLP, EMBEDDINGS, PRE_MLP_NORM
from slime.backends.megatron_utils.families.table import Family

FAMILY = Family(("my_llama",), EMBEDDINGS + ATTENTION + PRE_MLP_NORM + DENSE_MLP)


def config_facts(config):
    return {"normalization": "RMSNorm", "swiglu": True, "rotary_base": config["my_base"]}
"""
USE = """
from slime.backends.megatron_utils.families import find_family, get_family
from slime.utils.arguments.hf_facts import config_from_hf

assert get_family("my_llama").bind("decoder.layers.3.mlp.linear_fc2.weight").hf_names == (
    "model.layers.3.mlp.down_proj.weight",
)
facts = config_from_hf({"model_type": "my_llama", "hidden_size": 8, "my_base": 123.0})
assert facts["rotary_base"] == 123.0 and facts["hidden_size"] == 8 and facts["swiglu"]
assert find_family("nobodys") is None and find_family("no-identifier") is None
try:
    find_family("empty")
except ImportError as error:
    assert "empty.py has no FAMILY for model_type 'empty'" in str(error)
else:
    raise AssertionError("a plug-in without a family")
"""


def test_plugin_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "slime_plugins" / "models"
    folder.mkdir(parents=True)
    (folder / "my_llama.py").write_text(PLUGIN)
    (folder / "empty.py").write_text("")
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(Path(__file__).parents[2]), str(tmp_path)])
    result = subprocess.run(
        [sys.executable, "-c", USE], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
