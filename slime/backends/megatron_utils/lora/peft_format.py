"""Adapters in PEFT's form, which transformers, SGLang and vLLM read too."""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime.backends.megatron_utils import atomic_directory
from slime.backends.megatron_utils.families import family_of_checkpoint
from slime.backends.megatron_utils.lora.gather import gather_adapters
from slime.backends.megatron_utils.lora.weights import adapter_parameters

logger = logging.getLogger(__name__)

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
# variants of LoRA with other arithmetic than W + alpha / r * B A
_VARIANTS = ("use_dora", "use_rslora", "fan_in_fan_out", "lora_bias")


def save_adapter(args: argparse.Namespace, directory: str | Path, model: Sequence[torch.nn.Module]) -> None:
    """Write the adapter as `directory`, which appears when it is complete; all ranks take part, rank 0 writes.

    Raises:
        RuntimeError: rank 0 could not write; raised on every rank.
    """
    first = dist.get_rank() == 0
    tensors: dict[str, Tensor] = {}
    for name, tensor in gather_adapters(model):
        if first:
            tensors[f"{_PREFIX}{name}.weight"] = tensor.cpu().clone()
    failure = [_try_write(args, Path(directory), tensors) if first else None]
    dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise RuntimeError(f"the adapter export to {directory} failed: {failure[0]}")
    if first:
        logger.info("exported the adapter %s", directory)


@torch.no_grad()
def load_adapter(path: str | Path, args: argparse.Namespace, model: Sequence[torch.nn.Module]) -> None:
    """Fill the model's adapters from a PEFT folder; all ranks take part.

    Raises:
        FileNotFoundError: the folder lacks a file.
        ValueError: another rank, scale, variant or set of adapted layers, or another shape; both values are named.
    """
    from safetensors import safe_open

    directory = Path(path)
    _check_config(directory, args)
    used: list[str] = []
    with safe_open(_existing(directory / WEIGHTS_FILE), framework="pt") as file:
        stored = set(file.keys())
        for entry in adapter_parameters(model):
            key = f"{_PREFIX}{entry.name}.weight"
            if key not in stored:
                raise ValueError(f"{directory / WEIGHTS_FILE} has no {key}, which --lora-targets asks for")
            used.append(key)
            shard = entry.shard(file.get_tensor(key))
            if shard.shape != entry.parameter.shape:
                raise ValueError(f"{key} in {directory}: {tuple(shard.shape)}, not {tuple(entry.parameter.shape)}")
            entry.parameter.data.copy_(shard)
    _check_all_used(directory, stored, used)


def _try_write(args: argparse.Namespace, directory: Path, tensors: dict[str, Tensor]) -> str | None:
    """The error, if any: the other ranks wait for it."""
    from safetensors.torch import save_file

    try:
        staging = atomic_directory.start_staging(directory)
        save_file(tensors, staging / WEIGHTS_FILE, metadata={"format": "pt"})
        (staging / CONFIG_FILE).write_text(json.dumps(adapter_config(args, tensors), indent=2) + "\n")
        atomic_directory.publish_directory(directory)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def adapter_config(args: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """The content of adapter_config.json. `names`: of the tensors in the file."""
    modules = {name.removeprefix(_PREFIX).rsplit(".lora_", 1)[0] for name in names}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": os.path.abspath(args.hf_checkpoint),
        "r": args.lora_rank,
        "lora_alpha": args.lora_alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "target_modules": _target_modules(args, modules),
    }


def _target_modules(args: argparse.Namespace, modules: set[str]) -> list[str]:
    """Short names, or whole ones where a short name would also match a layer that has no adapter."""
    from slime.backends.megatron_utils.hf_to_megatron import SafetensorReader

    short = {module.rpartition(".")[2] for module in modules}
    family = family_of_checkpoint(args.hf_checkpoint)
    weights = (name for name in SafetensorReader(args.hf_checkpoint).names if not family.is_unused(name))
    matched = {
        name.removesuffix(".weight")
        for name in weights
        if name.endswith(".weight") and name.removesuffix(".weight").rpartition(".")[2] in short
    }
    return sorted(short if matched == modules else modules)


def _check_config(directory: Path, args: argparse.Namespace) -> None:
    config = json.loads(_existing(directory / CONFIG_FILE).read_text())
    for name, flag, ours in (("r", "--lora-rank", args.lora_rank), ("lora_alpha", "--lora-alpha", args.lora_alpha)):
        if config.get(name) != ours:
            raise ValueError(f"{directory / CONFIG_FILE}: {name} is {config.get(name)}, {flag} is {ours:g}")
    given = [name for name in (*_VARIANTS, "rank_pattern", "alpha_pattern", "modules_to_save") if config.get(name)]
    if given:
        raise ValueError(f"{directory / CONFIG_FILE} sets {', '.join(given)}, which slime's adapters don't have")


def _check_all_used(directory: Path, stored: set[str], used: list[str]) -> None:
    by_rank: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(by_rank, used)
    left = stored.difference(*by_rank)
    if left:
        shown = ", ".join(sorted(left)[:4])
        raise ValueError(f"{directory} adapts {len(left)} matrices that --lora-targets does not name: {shown}, ...")


def _existing(file: Path) -> Path:
    if not file.is_file():
        raise FileNotFoundError(f"--lora-load: {file} does not exist")
    return file
