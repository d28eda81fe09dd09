"""A tiny Qwen3.5 with a vision tower, images for it, and what transformers computes of them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from tiny_hf import MODELS, ROPE, SIZES, VOCAB

IMAGE, MERGE = VOCAB + 2, 2
PATCH_VALUES = 3 * 2 * 4 * 4
# [images of a sequence][time, height, width] in patches: 6 and 8 features, none, 2
GRIDS = [[(1, 4, 6), (1, 8, 4)], [], [(1, 2, 4)]]
TOWER = {
    "depth": 2,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 28,
    "in_channels": 3,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": MERGE,
    "num_position_embeddings": 36,
    "out_hidden_size": SIZES["hidden_size"],
}


def image_inputs(grids: list[tuple[int, int, int]], seed: int = 0) -> dict[str, Any] | None:
    """What a processor makes of random images of these sizes; None for none."""
    import torch

    if not grids:
        return None
    patches = sum(t * h * w for t, h, w in grids)
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(patches, PATCH_VALUES, generator=generator)
    return {"pixel_values": values, "image_grid_thw": torch.tensor(grids)}


def put_images(tokens: Any, grids: list[tuple[int, int, int]], start: int = 1) -> Any:
    """The tokens with each image's placeholders over them, one token of text between two images."""
    tokens = tokens.clone()
    for t, h, w in grids:
        size = t * h * w // MERGE**2
        assert start + size < len(tokens)
        tokens[start : start + size] = IMAGE
        start += size + 1
    return tokens


def add_images(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Images in the prompts of a rollout's samples that have the room: two of them, one, or none."""
    prompts = [total - n for total, n in zip(columns["total_lengths"], columns["response_lengths"], strict=True)]
    grids = [GRIDS[0] if prompt > 20 else GRIDS[2] if prompt in (7, 8) else [] for prompt in prompts]
    tokens = [put_images(tokens, images) for tokens, images in zip(columns["tokens"], grids, strict=True)]
    inputs = [image_inputs(images, seed) for seed, images in enumerate(grids)]
    return {**columns, "tokens": tokens, "multimodal_train_inputs": inputs}


def make_vision_model(directory: Path, text: str = "qwen3_5") -> Path:
    """Write the model and two references.

    `reference.pt` is that of `tiny_hf.make_model`, for text. `images.pt` holds sequences of three lengths (`tokens`,
    `inputs`) with the images of `GRIDS`, transformers' float32 `logits`, and the `gradients` of the sum of the
    squared logits of all sequences, by name.
    """
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    torch.manual_seed(5)
    fields = copy.deepcopy({**SIZES, **MODELS[text], "vocab_size": VOCAB + 5})
    # every axis has a frequency of its own: 4 in all
    fields["rope_parameters"] = {**ROPE, "partial_rotary_factor": 0.4, "mrope_section": [2, 1, 1]}
    outer = fields["model_type"].removesuffix("_text")
    ids = {"image_token_id": IMAGE, "video_token_id": IMAGE + 1, "vision_start_token_id": VOCAB}
    tied = fields["tie_word_embeddings"]
    config = AutoConfig.for_model(
        outer, text_config=fields, vision_config=TOWER, tie_word_embeddings=tied, vision_end_token_id=VOCAB + 1, **ids
    )
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.dim() == 1 else 0.05))
            if key.endswith(".A_log"):
                parameter.copy_(torch.randn_like(parameter) * 0.5 - 2)
        tokens = torch.randint(0, VOCAB, (2, 16))
        logits = model(input_ids=tokens).logits
    model.save_pretrained(directory)
    (directory / "tokenizer_config.json").write_text('{"stand-in": true}')
    torch.save({"tokens": tokens, "logits": logits}, directory / "reference.pt")
    torch.save(_references(model), directory / "images.pt")
    return directory


def _references(model: Any) -> dict[str, Any]:
    import torch

    rows = zip((23, 9, 14), GRIDS, strict=True)
    sequences = [put_images(torch.randint(0, VOCAB, (length,)), grids, start=2) for length, grids in rows]
    inputs = [image_inputs(grids, seed) for seed, grids in enumerate(GRIDS)]
    logits = []
    for tokens, images in zip(sequences, inputs, strict=True):
        kinds = {"mm_token_type_ids": (tokens == IMAGE).int()[None]} if images else {}
        out = model(input_ids=tokens[None], **(images or {}), **kinds).logits[0]
        out.square().sum().backward()
        logits.append(out.detach())
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"tokens": sequences, "inputs": inputs, "logits": logits, "gradients": gradients}
