"""Tiny models with a random adapter, written by hand in PEFT's format, and the same models with it merged in."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors.torch import save_file
from tiny_hf import make_model
from torch import Tensor

RANK, ALPHA = 4, 6.0
LORA_FLAGS = f"--lora-rank {RANK} --lora-alpha {ALPHA}"
_PREFIX = "base_model.model."
# linear layers that are no target: whole on every tensor-parallel rank
_WHOLE = ("q_a_proj", "kv_a_proj_with_mqa", "eh_proj")


def read_tensors(directory: str | Path) -> dict[str, Tensor]:
    from slime.backends.megatron_utils.hf_to_megatron import SafetensorReader

    reader = SafetensorReader(directory)
    return {name: reader.get_tensor(name) for name in sorted(reader.names)}


def write_random_adapter(model_dir: str | Path, directory: Path) -> None:
    """For all linear layers of the model, by the model's own tensor names."""
    generator = torch.Generator().manual_seed(11)
    tensors = {}
    for name, weight in read_tensors(model_dir).items():
        module = name.removesuffix(".weight")
        if not re.search(r"_proj(_[a-z]+)?$", module) or module.endswith(_WHOLE):
            continue
        outputs, inputs = weight.shape
        tensors[f"{_PREFIX}{module}.lora_A.weight"] = torch.randn(RANK, inputs, generator=generator) / inputs**0.5
        tensors[f"{_PREFIX}{module}.lora_B.weight"] = torch.randn(outputs, RANK, generator=generator) * 0.05
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": "all-linear"}
    (directory / "adapter_config.json").write_text(json.dumps(config))


def merged_tensors(model_dir: str | Path, adapter_dir: str | Path) -> dict[str, Tensor]:
    """W + alpha / r · B A in float64, rounded to float32."""
    from safetensors.torch import load_file

    adapter = load_file(Path(adapter_dir) / "adapter_model.safetensors")
    config = json.loads((Path(adapter_dir) / "adapter_config.json").read_text())
    tensors = read_tensors(model_dir)
    for key in [key for key in adapter if key.endswith(".lora_A.weight")]:
        down, up = adapter[key].double(), adapter[key.replace("lora_A", "lora_B")].double()
        name = key.removeprefix(_PREFIX).replace(".lora_A", "")
        tensors[name] = (tensors[name].double() + config["lora_alpha"] / config["r"] * up @ down).to(torch.float32)
    return tensors


def make_adapted(name: str, root: Path) -> None:
    """`root/models/<name>`, `root/adapters/<name>`, and `root/merged/<name>` with transformers' logits for the same
    tokens in its `reference.pt`."""
    from transformers import AutoModelForCausalLM

    model, adapter, merged = root / "models" / name, root / "adapters" / name, root / "merged" / name
    make_model(name, model)
    adapter.parent.mkdir(exist_ok=True)
    write_random_adapter(model, adapter)
    merged.mkdir(parents=True)
    save_file(merged_tensors(model, adapter), merged / "model.safetensors", metadata={"format": "pt"})
    (merged / "config.json").write_text((model / "config.json").read_text())
    tokens = torch.load(model / "reference.pt")["tokens"]
    loaded = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        torch.save({"tokens": tokens, "logits": loaded(tokens).logits}, merged / "reference.pt")
