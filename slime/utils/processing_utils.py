"""Tokenizers, processors, and images on their way to a model or an engine."""

from __future__ import annotations

import base64
import functools
import io
from typing import Any


def load_tokenizer(name_or_path: str, **kwargs: Any) -> Any:
    """The tokenizer of a Hugging Face folder or model name."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name_or_path, **kwargs)


@functools.cache
def special_tokens(name_or_path: str) -> tuple[str, ...]:
    """Texts of a tokenizer's special tokens, the empty one excluded."""
    tokenizer = load_tokenizer(name_or_path, trust_remote_code=True)
    return tuple(token for token in tokenizer.all_special_tokens if token)


def without_final_special_tokens(text: str, name_or_path: str) -> str:
    """`text` without the special tokens (end of turn, end of text) that it ends with."""
    endings = special_tokens(name_or_path)
    while ending := next((token for token in endings if text.endswith(token)), None):
        text = text.removesuffix(ending)
    return text


def load_processor(name_or_path: str, **kwargs: Any) -> Any:
    """The multimodal processor of a checkpoint; None for a text-only one."""
    from pathlib import Path

    folder = Path(name_or_path)
    names = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
    if folder.is_dir() and not any((folder / name).is_file() for name in names):
        return None  # AutoProcessor would hand back the tokenizer, after trying everything else
    from transformers import AutoProcessor, ProcessorMixin

    processor = AutoProcessor.from_pretrained(name_or_path, **kwargs)
    return processor if isinstance(processor, ProcessorMixin) else None


def build_processor_kwargs(multimodal_inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    """Keyword arguments of a processor call: tensors out, and the sample's images or other items."""
    return {"return_tensors": "pt", **(multimodal_inputs or {})}


def process_vision_info(prompt: list[dict[str, Any]], processor: Any) -> dict[str, Any]:
    """The items in a message list, by the names a processor takes: {"images": [...], "videos": [...]}.

    Images are opened (path, `file://`, data URL, bytes or PIL image); other items are passed on as they are.
    """
    if processor is None:
        raise ValueError("prompts with images need a checkpoint with a processor (preprocessor_config.json)")
    found: dict[str, list[Any]] = {}
    for message in prompt:
        for item in message["content"] if isinstance(message["content"], list) else []:
            kind = item.get("type")
            if kind in ("image", "image_url"):
                found.setdefault("images", []).append(_open_image(item.get("image", item.get("image_url"))))
            elif kind in ("video", "audio"):
                found.setdefault(f"{kind}s" if kind == "video" else kind, []).append(item[kind])
    return found


def _open_image(value: Any) -> Any:
    from PIL import Image

    value = value.get("url", value.get("bytes") or value.get("path")) if isinstance(value, dict) else value
    if isinstance(value, Image.Image):
        return value.convert("RGB")
    if isinstance(value, bytes):
        return Image.open(io.BytesIO(value)).convert("RGB")
    if value.startswith("data:"):
        return Image.open(io.BytesIO(base64.b64decode(value.split(",", 1)[1]))).convert("RGB")
    return Image.open(value.removeprefix("file://")).convert("RGB")


def encode_image_for_rollout_engine(image: Any) -> str:
    """A PIL image as PNG data URL, the form that the engine takes."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
