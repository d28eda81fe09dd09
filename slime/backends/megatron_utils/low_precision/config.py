"""A checkpoint's `quantization_config`."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from slime.backends.megatron_utils.low_precision.scheme import BlockFP8, PackedINT4, Scheme, TensorFP8

# what engines keep in full precision under FP8 although it is a matrix; a checkpoint's own list comes on top
FP8_LEFT_OUT = (
    "lm_head",
    "mlp.gate",
    "mlp.shared_expert_gate",
    "block_sparse_moe.gate",
    "eh_proj",
    "shared_head.head",
    "visual",
    "vision_tower",
)


def scheme_from_config(config: dict[str, Any], stored: Collection[str] | None = None) -> Scheme:
    """The scheme that a `quantization_config` describes.

    Args:
        stored: names of a checkpoint's tensors; what it stores in low precision then decides which weights are.

    Raises:
        ValueError: the method is not known here; the message says which part of it.
    """
    method = config.get("quant_method")
    if method == "fp8":
        scheme = _fp8(config)
    elif method == "compressed-tensors":
        scheme = _compressed_tensors(config)
    else:
        raise ValueError(f"quantization_config: quant_method {method!r} is not one of fp8, compressed-tensors")
    if stored is not None:
        scheme.follow(stored)
    return scheme


def scheme_of_checkpoint(path: str | Path) -> Scheme | None:
    """The scheme of a Hugging Face folder; None if its weights are stored in full precision.

    Raises:
        ValueError: as `scheme_from_config`; the message names the folder.
    """
    from slime.backends.megatron_utils.hf_to_megatron.reader import file_of_each_tensor

    config_file = Path(path) / "config.json"
    config = json.loads(config_file.read_text())
    quantization = config.get("quantization_config") or config.get("text_config", {}).get("quantization_config")
    if not quantization:
        return None
    try:
        return scheme_from_config(quantization, file_of_each_tensor(Path(path)).keys())
    except ValueError as error:
        raise ValueError(f"{config_file}: {error}") from error


def _fp8(config: dict[str, Any]) -> Scheme:
    if config.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise ValueError(f"quantization_config: fmt {config['fmt']!r} is not e4m3")
    if config.get("activation_scheme", "dynamic") != "dynamic":
        raise ValueError("quantization_config: activation_scheme must be dynamic; static scales would go stale")
    left_out = [*FP8_LEFT_OUT, *(config.get("modules_to_not_convert") or config.get("ignored_layers") or ())]
    block = config.get("weight_block_size")
    if not block:
        return TensorFP8(left_out=left_out)
    return BlockFP8((block[0], block[1]), ue8m0=config.get("scale_fmt") == "ue8m0", left_out=left_out)


def _compressed_tensors(config: dict[str, Any]) -> Scheme:
    groups = list((config.get("config_groups") or {}).values())
    weights = [group.get("weights") or {} for group in groups]
    if config.get("format") != "pack-quantized" or len(groups) != 1 or groups[0].get("input_activations"):
        raise ValueError(
            "quantization_config: of compressed-tensors only one group of pack-quantized weights is known"
        )
    settings = {key: weights[0].get(key) for key in ("num_bits", "type", "symmetric", "strategy")}
    wanted = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
    if settings != wanted:
        raise ValueError(f"quantization_config: weights are {settings}, only {wanted} is known")
    return PackedINT4(int(weights[0]["group_size"]), left_out=config.get("ignore") or ())
