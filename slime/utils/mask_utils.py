"""Loss masks of multi-turn conversations, for any chat template that transformers can render.

What the model would have sampled is trained: each assistant turn's content, and the token that ends the turn. Where a
turn's content lies is found by rendering the conversation again with that turn replaced by a marker: what both texts
share at the front and at the back is not the turn's. So nothing has to be known of the template.
"""

from __future__ import annotations

from typing import Any

MARKER = "\ue000slime\ue001"  # from the private use area: in no conversation


def get_response_lengths(loss_masks: list[list[int]]) -> list[int]:
    """Tokens from the first trained one to the end, per mask; 0 for a mask without ones.

    >>> get_response_lengths([[0, 0, 1, 1, 0, 1], [0, 0]])
    [4, 0]
    """
    return [len(mask) - mask.index(1) if 1 in mask else 0 for mask in loss_masks]


class MultiTurnLossMaskGenerator:
    """Token ids and loss mask of conversations under a tokenizer's chat template.

    Args:
        tokenizer: a fast tokenizer with a chat template.
        tokenizer_type: a name of `--loss-mask-type`. The method is the same for all.
    """

    TYPES = ("general", "qwen", "qwen3", "qwen3_5", "distill_qwen")

    def __init__(self, tokenizer: Any, tokenizer_type: str = "qwen") -> None:
        if tokenizer_type not in self.TYPES:
            raise ValueError(f"unknown loss mask type {tokenizer_type!r}; there are {', '.join(self.TYPES)}")
        self.tokenizer = tokenizer
        self.tokenizer_type = tokenizer_type

    def get_response_lengths(self, loss_masks: list[list[int]]) -> list[int]:
        """See the function of this name."""
        return get_response_lengths(loss_masks)

    def get_loss_mask(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
    ) -> tuple[list[int], list[int]]:
        """(token ids, mask of the same length) of the rendered conversation.

        A message with `step_loss_mask` other than 1 is not trained.
        """
        text = self._render(messages, tools)
        spans, previous_end = [], 0
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                start, end = self._turn_span(text, messages, i, tools, previous_end)
                previous_end = end
                if message.get("step_loss_mask", 1) == 1:
                    spans.append((start, end))
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
        mask = [0] * len(ids)
        for start, end in spans:
            self._mark(mask, ids, offsets, text, start, end)
        return ids, mask

    gen_multi_turn_loss_mask_qwen = get_loss_mask
    gen_multi_turn_loss_mask_qwen3 = get_loss_mask
    gen_multi_turn_loss_mask_qwen3_5 = get_loss_mask
    gen_multi_turn_loss_mask_distill_qwen = get_loss_mask

    def get_loss_mask_with_multimodal_alignment(
        self, messages: list[dict[str, Any]], input_ids: list[int], tools: list[dict[str, Any]] | None = None
    ) -> tuple[list[int], list[int]]:
        """Mask for a processor's ids, in which one placeholder token of the text stands repeated; those get 0.

        Raises:
            ValueError: the ids are not an expansion of the text's.
        """
        ids, mask = self.get_loss_mask(messages, tools)
        aligned, position = [], 0
        for token in input_ids:
            matches = position < len(ids) and token == ids[position]
            aligned.append(mask[position] if matches else 0)
            position += matches
        if position < len(ids):
            raise ValueError(f"the processor's ids don't contain the text's token {ids[position]} (no. {position})")
        return list(input_ids), aligned

    def get_text_from_loss_mask(self, token_ids: list[int], loss_masks: list[int]) -> list[str]:
        """The text of each stretch of trained tokens."""
        stretches: list[list[int]] = []
        previous = 0
        for token, trained in zip(token_ids, loss_masks, strict=True):
            if trained:
                stretches.append([]) if not previous else None
                stretches[-1].append(token)
            previous = trained
        return [self.tokenizer.decode(stretch) for stretch in stretches]

    def _render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, **kwargs: Any) -> str:
        return self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **kwargs)

    def _turn_span(
        self, text: str, messages: list[dict[str, Any]], i: int, tools: Any, previous_end: int
    ) -> tuple[int, int]:
        """Characters of `text` that assistant message i makes, without header and end tag."""
        marked = self._render([*messages[:i], {"role": "assistant", "content": MARKER}, *messages[i + 1 :]], tools)
        if MARKER not in marked:
            raise ValueError(f"the chat template doesn't render the content of assistant message {i}")
        start = _common_prefix(text, marked)
        end = len(text) - _common_prefix(text[start:][::-1], marked[start:][::-1])
        # A thinking block that the message brought is sampled, though an inserted empty one begins with the same text.
        head = self._header(messages[:i], tools)
        header_end = text.rfind(head, previous_end, start) + len(head) if head else -1
        if head and header_end >= len(head) and _brings(messages[i], text[header_end:start]):
            start = header_end
        return start, end

    def _header(self, history: list[dict[str, Any]], tools: Any) -> str:
        """What the template puts before an answer: its generation prompt."""
        if not history:
            return ""
        without = self._render(history, tools, add_generation_prompt=False)
        with_prompt = self._render(history, tools, add_generation_prompt=True)
        return with_prompt[len(without) :] if with_prompt.startswith(without) else ""

    def _mark(
        self, mask: list[int], ids: list[int], offsets: list[tuple[int, int]], text: str, start: int, end: int
    ) -> None:
        """Set the mask for tokens inside [start, end), and for the special token behind it: the decision to stop."""
        for i, (first, last) in enumerate(offsets):
            if first >= end and text[end:first].strip() == "":
                if ids[i] in self._special_ids:
                    mask[i] = 1
                    return
                if text[first:last].strip():
                    return
            elif first < end and last > start:
                mask[i] = 1

    @property
    def _special_ids(self) -> set[int]:
        return {*self.tokenizer.all_special_ids, *self.tokenizer.added_tokens_decoder}


def _brings(message: dict[str, Any], inserted: str) -> bool:
    """Whether the text between header and marker stands in the message itself."""
    if not inserted.strip():
        return bool(inserted)
    content = message.get("content") or ""
    return bool(message.get("reasoning_content")) or (isinstance(content, str) and inserted.strip() in content)


def _common_prefix(a: str, b: str) -> int:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
