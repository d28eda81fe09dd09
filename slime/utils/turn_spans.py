"""Where the assistant turns lie in a rendered conversation, whatever the chat template.

A conversation is rendered again with markers in the place of its assistant turns. Where the pieces of text between the
markers make up the real text too, what lies between them there is the turns: nothing has to be known of the template.

1. All turns at once: a few renderings per conversation.
2. Where that leaves room for doubt (a piece that stands in the text twice, a template that renders other messages
   differently for the markers' sake), turn by turn: first on the conversation up to the turn, which must begin the
   whole one, then on all of it.
3. A conversation for which no proof holds has no mask.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

Messages = list[dict[str, Any]]
Span = tuple[int, int]
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

    def spans(self) -> list[Span]:
        """Characters [start, end) of each assistant message: what the model sampled, without header and end tag.

        Raises:
            ValueError: the template doesn't let a turn be told from the rest; says which message.
        """
        at_once = self.spans_at_once()
        return at_once if at_once is not None else self.spans_one_by_one()

    @property
    def _positions(self) -> list[int]:
        return [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]

    # -- all turns at once --------------------------------------------------------------------------------------------

    def spans_at_once(self) -> list[Span] | None:
        """All turns from one marked rendering; None without the proof."""
        if not self._positions:
            return []
        if not self._nothing_vanishes(self._positions, range(len(self.messages))):
            return None
        marked = self._try_render([MARKED if m["role"] == "assistant" else m for m in self.messages])
        pieces = marked.split(MARKER) if marked is not None else []
        if len(pieces) != len(self._positions) + 1 or not self.text.endswith(pieces[-1]):
            return None
        header = next(filter(None, (self._header(i) for i in self._positions)), "")
        ends = [self.text.find(_up_to(header, piece)) for piece in pieces[1:-1]]
        ends.append(len(self.text) - len(pieces[-1]))
        starts: list[int] = []
        for i, piece, found in zip(self._positions, pieces[:-1], [0, *ends[:-1]], strict=True):
            front = _up_to(header, piece)
            fits = self.text.count(front) == 1 if starts else self.text.startswith(front)
            if not fits:
                return None
            starts.append(self._behind(i, found + len(front), piece[len(front) :]))
        in_order = [0, *itertools.chain(*zip(starts, ends, strict=True))]
        return list(zip(starts, ends, strict=True)) if in_order == sorted(in_order) else None

    def _behind(self, i: int, start: int, inserted: str) -> int:
        """Where message i's text starts, with what the template put behind the header of a marked one."""
        there = self.text.startswith(inserted, start)
        return start + len(inserted) if there and not _brings(self.messages[i], inserted) else start

    # -- turn by turn -------------------------------------------------------------------------------------------------

    def spans_one_by_one(self) -> list[Span]:
        """Each turn with a proof of its own."""
        spans: list[Span] = []
        for i in self._positions:
            bounds = self._bounds_up_to(i) or self._bounds_in_all(i)
            span = self._without_header(i, spans[-1][1] if spans else 0, *bounds) if bounds is not None else None
            if span is None:
                raise ValueError(
                    f"the chat template renders assistant message {i} in a way that can't be told from its"
                    " surroundings: with another text in its place, other messages change too"
                )
            spans.append(span)
        return spans

    def _bounds_up_to(self, i: int) -> Bounds | None:
        text = self._try_render(self.messages[: i + 1])
        if text is None:
            return None
        bounds = self._bounds(i, [], text)
        return bounds if bounds is not None and self.text.startswith(text[: bounds[1]]) else None

    def _bounds_in_all(self, i: int) -> Bounds | None:
        following = range(i + 1, len(self.messages))
        return self._bounds(i, self.messages[i + 1 :], self.text) if self._nothing_vanishes([i], following) else None

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

    def _without_header(self, i: int, previous_end: int, start: int, end: int, shared: int) -> Span | None:
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

    # -- both ---------------------------------------------------------------------------------------------------------

    def _nothing_vanishes(self, marked: list[int], named: Iterable[int]) -> bool:
        """Whether the markers make no other message vanish, as a tool result might without a call before it."""
        names = {i: f"\ue000{i}\ue001" for i in named if i not in marked}
        plain = [m | {"content": names[i]} if i in names else m for i, m in enumerate(self.messages)]
        swapped = [MARKED if i in marked else message for i, message in enumerate(plain)]
        before, after = self._try_render(plain), self._try_render(swapped)
        if before is None or after is None:
            return False
        return all((name in before) == (name in after) for name in names.values())

    def _header(self, i: int) -> str:
        """What the template puts before an answer: its generation prompt."""
        if i == 0:
            return ""
        without = self._try_render(self.messages[:i])
        with_prompt = self._try_render(self.messages[:i], add_generation_prompt=True)
        if without is None or with_prompt is None or not with_prompt.startswith(without):
            return ""
        return with_prompt[len(without) :]

    def _try_render(self, messages: Messages, add_generation_prompt: bool = False) -> str | None:
        try:
            return self.render(messages, add_generation_prompt)
        except Exception:  # templates refuse conversations with whatever they like
            return None


def _up_to(header: str, piece: str) -> str:
    """A piece of text without what stands behind its last header."""
    at = piece.rfind(header) if header else -1
    return piece[: at + len(header)] if at >= 0 else piece


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
