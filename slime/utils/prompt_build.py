"""Prompts as message lists, with images and other items put where their placeholders stand."""

from __future__ import annotations

import logging
import re
from typing import Any

from slime.utils.types import MultimodalTypes

logger = logging.getLogger(__name__)


def build_messages(prompt: Any, items: dict[str, Any]) -> list[dict[str, Any]]:
    """Turn a string or list prompt into messages whose text holds `items` (kind → the row's items, in order).

    A string becomes one user message. Contents that are lists already are left alone.

    Raises:
        ValueError: the number of placeholders differs from the number of items.
    """
    messages: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, str):
        messages = [dict(message) for message in prompt]
    if not items:
        return messages
    queues = {kind: list(values) if isinstance(values, (list, tuple)) else [values] for kind, values in items.items()}
    counts = {kind: len(queue) for kind, queue in queues.items()}
    kinds: dict[str, str] = {MultimodalTypes.get(kind).placeholder: kind for kind in queues}
    splitter = re.compile("(" + "|".join(re.escape(placeholder) for placeholder in kinds) + ")")
    for message in messages:
        if isinstance(message["content"], str):
            message["content"] = _insert_items(splitter.split(message["content"]), kinds, queues, counts)
        else:
            logger.warning("a message's content is a list already; its items are left as they are")
            return messages
    for kind, queue in queues.items():
        if queue:
            raise ValueError(f"{counts[kind]} {kind} items, but {counts[kind] - len(queue)} placeholders")
    return messages


def _insert_items(
    pieces: list[str], kinds: dict[str, str], queues: dict[str, list[Any]], counts: dict[str, int]
) -> list[dict[str, Any]]:
    content = []
    for piece in pieces:
        kind = kinds.get(piece)
        if kind is None:
            if piece:
                content.append({"type": "text", "text": piece})
            continue
        if not queues[kind]:
            raise ValueError(f"more {kind} placeholders than the row's {counts[kind]} {kind} items")
        item = queues[kind].pop(0)
        content.append(item if isinstance(item, dict) and "type" in item else {"type": kind, kind: item})
    return content
