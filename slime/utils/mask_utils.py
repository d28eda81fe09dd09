"""Loss masks of multi-turn conversations, for any chat template that transformers can render.

What the model would have sampled is trained: each assistant turn's content with its thinking and tool calls, and the
token that ends the turn. A template that says itself what it generates (`{% generation %}`) is taken at its word; for
any other `slime.utils.turn_spans` finds the turns.
"""

from __future__ import annotations

import bisect
import re
from typing import Any

from slime.utils.turn_spans import MARKER, Turns

GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


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

    Raises:
        ValueError: an unknown type, or a tokenizer that can't tell which characters a token stands for.
    """

    TYPES = ("general", "qwen", "qwen3", "qwen3_5", "distill_qwen", "glm4", "llama3")

    def __init__(self, tokenizer: Any, tokenizer_type: str = "qwen") -> None:
        if tokenizer_type not in self.TYPES:
            raise ValueError(f"unknown loss mask type {tokenizer_type!r}; there are {', '.join(self.TYPES)}")
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(f"loss masks need a fast tokenizer (tokenizer.json); this is {type(tokenizer).__name__}")
        self.tokenizer = tokenizer
        self.tokenizer_type = tokenizer_type
        self._special_ids = frozenset(tokenizer.all_special_ids) | frozenset(tokenizer.added_tokens_decoder)

    def get_response_lengths(self, loss_masks: list[list[int]]) -> list[int]:
        """See the function of this name."""
        return get_response_lengths(loss_masks)

    def get_loss_mask(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> tuple[list[int], list[int]]:
        """(token ids, mask of the same length) of the rendered conversation.

        A message with `step_loss_mask` other than 1 is not trained.

        Args:
            template_kwargs: what else the template takes, such as `enable_thinking`.

        Raises:
            ValueError: the template gives no way to tell what the model sampled.
        """
        kwargs = dict(template_kwargs or {})
        if GENERATION_TAG.search(str(self.tokenizer.get_chat_template(tools=tools))):
            return self._mask_of_the_template(messages, tools, kwargs)

        def render(some: list[dict[str, Any]], add_generation_prompt: bool) -> str:
            options = kwargs | {"add_generation_prompt": add_generation_prompt}
            return self.tokenizer.apply_chat_template(some, tools=tools, tokenize=False, **options)

        text = render(messages, False)
        if MARKER in text:
            raise ValueError(f"the conversation holds the text {MARKER!r}, which marks turns")
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
        mask = [0] * len(ids)
        answers = [message for message in messages if message["role"] == "assistant"]
        for message, (start, end) in zip(answers, Turns(render, messages, text).spans(), strict=True):
            if _is_trained(message):
                self._mark(mask, ids, offsets, text, start, end)
        return ids, mask

    gen_multi_turn_loss_mask_qwen = get_loss_mask
    gen_multi_turn_loss_mask_qwen3 = get_loss_mask
    gen_multi_turn_loss_mask_qwen3_5 = get_loss_mask
    gen_multi_turn_loss_mask_distill_qwen = get_loss_mask

    def get_loss_mask_with_multimodal_alignment(
        self,
        messages: list[dict[str, Any]],
        input_ids: list[int],
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> tuple[list[int], list[int]]:
        """Mask for a processor's ids, in which one placeholder token of the text stands repeated; those get 0.

        Raises:
            ValueError: the ids are not an expansion of the text's.
        """
        ids, mask = self.get_loss_mask(messages, tools, template_kwargs)
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
        return [self.tokenizer.decode(token_ids[start:end]) for start, end in _stretches(loss_masks)]

    def _mask_of_the_template(
        self, messages: list[dict[str, Any]], tools: Any, kwargs: dict[str, Any]
    ) -> tuple[list[int], list[int]]:
        options = kwargs | {"return_dict": True, "return_assistant_tokens_mask": True}
        encoded = self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=True, **options)
        ids, mask = list(encoded["input_ids"]), list(encoded["assistant_masks"])
        trained = [_is_trained(message) for message in messages if message["role"] == "assistant"]
        if all(trained):
            return ids, mask
        stretches = _stretches(mask)
        if len(stretches) != len(trained):
            raise ValueError(
                f"step_loss_mask: the template marks {len(stretches)} stretches as generated for {len(trained)}"
                " assistant messages, so it can't be said which of them a message made"
            )
        for (start, end), keep in zip(stretches, trained, strict=True):
            mask[start:end] = [int(keep)] * (end - start)
        return ids, mask

    def _mark(
        self, mask: list[int], ids: list[int], offsets: list[tuple[int, int]], text: str, start: int, end: int
    ) -> None:
        """Set the mask for tokens inside [start, end), and for the special token behind it: the decision to stop."""
        first = bisect.bisect_right(offsets, start, key=lambda offset: offset[1])
        for i in range(first, len(ids)):
            begin, finish = offsets[i]
            if begin < end:
                mask[i] = int(finish > start)
            elif ids[i] in self._special_ids:
                mask[i] = 1
                return
            elif text[end:finish].strip():
                return


def _is_trained(message: dict[str, Any]) -> bool:
    return message.get("step_loss_mask", 1) == 1


def _stretches(mask: list[int]) -> list[tuple[int, int]]:
    """[start, end) of each run of ones."""
    edges = [i for i, (a, b) in enumerate(zip([0, *mask], [*mask, 0], strict=True)) if bool(a) != bool(b)]
    return list(zip(edges[::2], edges[1::2], strict=True))
