"""Flags and functions of the small GRPO run that end-to-end tests start from."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

from slime.utils.types import Sample

Flags = dict[str, Any]


def tiny_run(model: Path, folder: Path, **changes: Any) -> list[str]:
    """Command line of a colocated run: 4 prompts x 4 answers of 8 tokens per rollout, two rollouts.

    `changes` are flags by attribute name: a value replaces the flag's, True is a flag without a value, None leaves
    the flag out, a list gives several words.
    """
    flags: Flags = {
        "hf_checkpoint": model,
        "ref_load": model,
        "prompt_data": write_prompts(folder),
        "input_key": "prompt",
        "label_key": "label",
        "custom_rm_path": f"{__name__}.share_of_even_tokens",
        "colocate": True,
        "actor_num_nodes": 1,
        "actor_num_gpus_per_node": 1,
        "num_rollout": 2,
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 4,
        "global_batch_size": 16,
        "rollout_max_response_len": 8,
        "rollout_seed": 7,
        "use_dynamic_batch_size": True,
        "max_tokens_per_gpu": 512,
        "advantage_estimator": "grpo",
        "use_kl_loss": True,
        "kl_loss_coef": 0.01,
        "kl_loss_type": "low_var_kl",
        "lr": 1e-3,
        "lr_decay_style": "constant",
        **changes,
    }
    return to_words(flags)


def to_words(flags: Flags) -> list[str]:
    """{"num_rollout": 2, "colocate": True} → ["--num-rollout", "2", "--colocate"]."""
    words: list[str] = []
    for name, value in flags.items():
        if value is None:
            continue
        words.append("--" + name.replace("_", "-"))
        if value is not True:
            words += [str(word) for word in (value if isinstance(value, list) else [value])]
    return words


def write_prompts(folder: Path, count: int = 16) -> Path:
    """A jsonl of additions."""
    path = folder / "prompts.jsonl"
    rows = [{"prompt": f"{i}+{i + 1}=", "label": str(2 * i + 1)} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


async def share_of_even_tokens(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """A reward that any model earns some of, and that depends on nothing but the tokens."""
    response = sample.tokens[len(sample.tokens) - sample.response_length :]
    return sum(token % 2 == 0 for token in response) / max(len(response), 1)


async def raises_at_fifth(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """A reward function with a mistake in it."""
    if sample.index == 5:
        return 1 / 0
    return 0.5
