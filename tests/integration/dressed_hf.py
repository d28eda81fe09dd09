"""Tiny models as they are published where transformers writes them otherwise or not at all.

The reference logits stay those of the plain model: what is added does not take part, and the rest is only renamed.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tiny_hf import make_model


def make_mimo(directory: Path) -> Path:
    """A Qwen2 under MiMo's name, with a layer that predicts ahead."""
    make_model("mimo", directory)
    weights = _read(directory)
    inner = _layer(weights, "model.layers.0.", "model.mtp_layers.0.")
    hidden = weights["model.norm.weight"].numel()
    own = {
        "model.mtp_layers.0.token_layernorm.weight": (hidden,),
        "model.mtp_layers.0.hidden_layernorm.weight": (hidden,),
        "model.mtp_layers.0.final_layernorm.weight": (hidden,),
        "model.mtp_layers.0.input_proj.weight": (hidden, 2 * hidden),
    }
    _write(directory, weights | inner | _random(own))
    config = json.loads((directory / "config.json").read_text())
    config |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def add_qwen_prediction_layer(directory: Path, number_of_a_softmax_layer: int = 3) -> Path:
    """A layer that predicts ahead, as Qwen3-Next and Qwen3.5 have it."""
    weights = _read(directory)
    inner = _layer(weights, f"model.layers.{number_of_a_softmax_layer}.", "mtp.layers.0.")
    hidden = weights["model.norm.weight"].numel()
    own = {
        "mtp.pre_fc_norm_embedding.weight": (hidden,),
        "mtp.pre_fc_norm_hidden.weight": (hidden,),
        "mtp.norm.weight": (hidden,),
        "mtp.fc.weight": (hidden, 2 * hidden),
    }
    _write(directory, weights | inner | _random(own))
    return directory


def make_kimi(directory: Path) -> Path:
    """A DeepSeek-V3 under Kimi-K2's name."""
    make_model("deepseek_v3", directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "model_type": "kimi_k2"}))
    return directory


def add_deepseek_prediction_layer(directory: Path, layers: int = 4) -> Path:
    """A layer that predicts ahead, as DeepSeek-V3 and GLM-4.5 have it: numbered on after the last of `layers`."""
    weights = _read(directory)
    ahead = f"model.layers.{layers}."
    inner = _layer(weights, f"model.layers.{layers - 1}.", ahead)
    hidden = weights["model.norm.weight"].numel()
    own = {
        ahead + "enorm.weight": (hidden,),
        ahead + "hnorm.weight": (hidden,),
        ahead + "eh_proj.weight": (hidden, 2 * hidden),
        ahead + "shared_head.norm.weight": (hidden,),
    }
    _write(directory, weights | inner | _random(own))
    return directory


def make_qwen3_5_moe(text: Path, directory: Path) -> Path:
    """`text` as the text model of a Qwen3.5 with a vision tower, each layer's experts in one tensor."""
    import torch

    shutil.copytree(text, directory)
    weights, stacked = {}, {}
    for name, tensor in _read(text).items():
        name = name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name
        layer, experts, rest = name.partition(".mlp.experts.")
        if experts:
            number, _, kind = rest.partition(".")
            stacked.setdefault(layer + experts, {})[int(number), kind.split("_")[0]] = tensor
        else:
            weights[name] = tensor
    for prefix, parts in stacked.items():
        numbers = sorted({number for number, _ in parts})
        both = [torch.cat([parts[n, "gate"], parts[n, "up"]]) for n in numbers]
        weights[prefix + "gate_up_proj"] = torch.stack(both)
        weights[prefix + "down_proj"] = torch.stack([parts[n, "down"] for n in numbers])
    vision = {"model.visual.patch_embed.proj.weight": (8, 3, 2, 4, 4), "model.visual.merger.norm.bias": (8,)}
    _write(directory, weights | _random(vision))
    config: dict[str, Any] = json.loads((text / "config.json").read_text())
    outer = {
        "model_type": "qwen3_5_moe",
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "tie_word_embeddings": config["tie_word_embeddings"],
        "dtype": config["dtype"],
        "text_config": config,
    }
    (directory / "config.json").write_text(json.dumps(outer))
    return directory


def _layer(weights: dict[str, Any], source: str, target: str) -> dict[str, Any]:
    """Random weights named and shaped as those of a layer."""
    return _random(
        {
            target + name.removeprefix(source): tuple(value.shape)
            for name, value in weights.items()
            if name.startswith(source)
        }
    )


def _random(shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    import torch

    return {name: torch.randn(shape) * 0.1 for name, shape in shapes.items()}


def _read(directory: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")


def _write(directory: Path, weights: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
