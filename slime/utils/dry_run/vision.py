"""How many parameters a vision tower has, as transformers 5.19 builds Qwen3.5's."""

from __future__ import annotations

from argparse import Namespace

from slime.utils.arguments.rules.loading import read_hf_config


def count_tower_parameters(args: Namespace) -> int:
    """Of the tower that each rank of the first pipeline stage holds whole; 0 without one."""
    if args.vision_tower not in ("frozen", "trained"):
        return 0
    config = read_hf_config(args.hf_checkpoint)["vision_config"]
    hidden, inner, patch = config["hidden_size"], config["intermediate_size"], config["patch_size"]
    merged = hidden * config["spatial_merge_size"] ** 2
    patch_values = config["in_channels"] * config["temporal_patch_size"] * patch**2
    block = 4 * hidden + _linear(hidden, 3 * hidden) + _linear(hidden, hidden)
    block += _linear(hidden, inner) + _linear(inner, hidden)
    merger = 2 * hidden + _linear(merged, merged) + _linear(merged, config["out_hidden_size"])
    positions = config["num_position_embeddings"] * hidden
    return _linear(patch_values, hidden) + positions + config["depth"] * block + merger


def _linear(inputs: int, outputs: int) -> int:
    return (inputs + 1) * outputs
