"""A configuration that parses, to be changed by one thing in a test."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

from slime.utils.arguments import parse_args

HF_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "vocab_size": 300,
    "max_position_embeddings": 4096,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
}


class BaseConfig:
    """Files and flags of a run on one device with four samples of each of four prompts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = folder / "model"
        self.model.mkdir()
        self.write_model_config(HF_CONFIG)
        self.prompts = self.write("prompts.jsonl", '{"input": "1+1=", "label": "2"}\n')
        self.flags: dict[str, Any] = {
            "--hf-checkpoint": self.model,
            "--prompt-data": self.prompts,
            "--rollout-batch-size": 4,
            "--n-samples-per-prompt": 4,
            "--num-rollout": 2,
            "--rollout-max-response-len": 8,
            "--actor-num-gpus-per-node": 1,
            "--colocate": None,
        }

    def write(self, name: str, text: str) -> str:
        (self.folder / name).write_text(text)
        return str(self.folder / name)

    def write_model_config(self, config: dict[str, Any]) -> None:
        (self.model / "config.json").write_text(json.dumps(config))

    def argv(self, *words: Any, without: tuple[str, ...] = ()) -> list[str]:
        """The base flags, less those in `without` and those that `words` gives itself, then `words`."""
        own = [str(word) for word in words]
        dropped = {*without, *own}
        base = [(name, value) for name, value in self.flags.items() if name not in dropped]
        return [word for name, value in base for word in ([name] if value is None else [name, str(value)])] + own

    def parse(self, *words: Any, without: tuple[str, ...] = ()) -> Namespace:
        return parse_args(argv=self.argv(*words, without=without))
