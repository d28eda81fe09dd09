"""Where an assistant turn lies in a rendered conversation, whatever the chat template.

A conversation is rendered again with the turn replaced by a marker. When the text before the marker begins the real
text, and the text behind it ends the real text, then what lies between is the turn: nothing has to be known of the
template. First that is tried on the conversation up to the turn, where it must begin the whole one; templates that
render a turn differently once others follow (thinking is dropped) need all of it. A conversation for which neither
proof holds has no mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Messages = list[dict[str, Any]]
Bounds = tuple[int, int, int]
MARKER = "\ue000slime\ue001"  # from the private use area: in no conversation
MARKED: dict[str, Any] = {"role": "assistant", "content": MARKER}


@dataclass(frozen=True)
class Turns:
    """A conversation under a template.

    Attributes:
        render: (messages, add_generation_prompt) → text.
        messages: the conversation.
        text: the conversation, rendered.
    """

    render: Callable[[Messages, bool], str]
    messages: Messages
    text: str

    def span(self, i: int, previous_end: int) -> tuple[int, int]:
        """Characters [start, end) of message i, an assistant's: what the model sampled, without header and end tag.

        Args:
            previous_end: where the assistant turn before this one ends.

        Raises:
            ValueError: the template doesn't let the turn be told from the rest; says which message.
        """
        bounds = self._bounds_up_to(i) or self._bounds_in_all(i)
        span = self._without_header(i, previous_end, *bounds) if bounds is not None else None
        if span is None:
            raise ValueError(
                f"the chat template renders assistant message {i} in a way that can't be told from its surroundings:"
                " with another text in its place, other messages change too"
            )
        return span

    def _bounds_up_to(self, i: int) -> Bounds | None:
        text = self._try_render(self.messages[: i + 1])
        if text is None:
            return None
        bounds = self._bounds(i, [], text)
        return bounds if bounds is not None and self.text.startswith(text[: bounds[1]]) else None

    def _bounds_in_all(self, i: int) -> Bounds | None:
        following = self.messages[i + 1 :]
        return self._bounds(i, following, self.text) if self._followed_by_the_same(i, following) else None

    def _followed_by_the_same(self, i: int, following: Messages) -> bool:
        """Whether the marker makes no later message vanish, as a tool result might without a call before it."""
        names = [f"\ue000{k}\ue001" for k in range(len(following))]
        named = [message | {"content": name} for message, name in zip(following, names, strict=True)]
        found = []
        for turn in (self.messages[i], MARKED):
            text = self._try_render([*self.messages[:i], turn, *named])
            found.append([name for name in names if text is not None and name in text])
        return found[0] == found[1]

    def _bounds(self, i: int, following: Messages, text: str) -> Bounds | None:
        """(start, end, end of what text and marked text share at the front); None without the proof."""
        marked = self._try_render([*self.messages[:i], MARKED, *following])
        if marked is None:
            return None
        before, found, behind = marked.partition(MARKER)
        if not found or MARKER in behind or not text.endswith(behind):
            return None
        shared = _common_prefix(text, before)
        return len(before), len(text) - len(behind), shared

    def _try_render(self, messages: Messages, add_generation_prompt: bool = False) -> str | None:
        try:
            return self.render(messages, add_generation_prompt)
        except Exception:  # templates refuse conversations with whatever they like
            return None

    def _without_header(self, i: int, previous_end: int, start: int, end: int, shared: int) -> tuple[int, int] | None:
        """The span without what the template puts before an answer, but with the thinking that the message brings."""
        header = self._header(i)
        header_end = -1
        if header:
            found = self.text.rfind(header, previous_end, min(shared, end))
            header_end = found + len(header) if found >= 0 else -1
        if shared < start:  # the marker's turn got an empty thinking block, this one has a full one or none
            return (header_end, end) if header_end >= 0 else None
        if header_end >= 0 and _brings(self.messages[i], self.text[header_end:start]):
            return header_end, end
        return (start, end) if start <= end else None

    def _header(self, i: int) -> str:
        """What the template puts before an answer: its generation prompt."""
        if i == 0:
            return ""
        without = self._try_render(self.messages[:i])
        with_prompt = self._try_render(self.messages[:i], add_generation_prompt=True)
        if without is None or with_prompt is None or not with_prompt.startswith(without):
            return ""
        return with_prompt[len(without) :]


def _brings(message: dict[str, Any], inserted: str) -> bool:
    """Whether the text between header and content stands in the message itself."""
    if not inserted.strip():
        return bool(inserted)
    content = message.get("content") or ""
    return bool(message.get("reasoning_content")) or (isinstance(content, str) and inserted.strip() in content)


def _common_prefix(a: str, b: str) -> int:
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length
    return next(i for i in range(length) if a[i] != b[i])
