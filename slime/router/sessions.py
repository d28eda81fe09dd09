"""The tokens of sessions: what an engine sampled is found again by its text, so that it is never tokenised anew.

A tokenizer does not give back the tokens that were sampled: "ab" may have been sampled as "a", "b" and be encoded as
"ab". A model that is trained, or goes on, from other tokens than it sampled is off-policy without anyone knowing. So
each answer is kept with its tokens, and a text that begins with a known text begins with that one's tokens.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, Protocol

SESSION_IDLE_SECONDS = 4 * 3600.0  # then a session is forgotten


class Tokenizer(Protocol):
    """What is needed of one."""

    all_special_ids: list[int]

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """A text and its tokens.

    Attributes:
        tokens: ids of the whole text.
        loss_mask: 1 for each token that an engine sampled, else 0; as long as `tokens`.
        log_probs: of the sampled tokens, 0.0 elsewhere; as long as `tokens`.
        weight_versions: of the engine in each turn.
        prompt_length, prompt_characters: tokens and text before the first answer; None where there is none.
    """

    text: str = ""
    tokens: tuple[int, ...] = ()
    loss_mask: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    weight_versions: tuple[str, ...] = ()
    prompt_length: int | None = None
    prompt_characters: int | None = None

    def extended(self, text: str, tokens: Sequence[int]) -> Trajectory:
        """With text that no engine sampled behind it."""
        return dataclasses.replace(
            self,
            text=self.text + text,
            tokens=(*self.tokens, *tokens),
            loss_mask=(*self.loss_mask, *[0] * len(tokens)),
            log_probs=(*self.log_probs, *[0.0] * len(tokens)),
        )

    def answered(self, text: str, tokens: Sequence[int], log_probs: Sequence[float], version: str) -> Trajectory:
        """With an engine's answer behind it."""
        return Trajectory(
            text=self.text + text,
            tokens=(*self.tokens, *tokens),
            loss_mask=(*self.loss_mask, *[1] * len(tokens)),
            log_probs=(*self.log_probs, *log_probs),
            weight_versions=(*self.weight_versions, version),
            prompt_length=len(self.tokens) if self.prompt_length is None else self.prompt_length,
            prompt_characters=len(self.text) if self.prompt_characters is None else self.prompt_characters,
        )

    def cut(self, text: str, count: int) -> Trajectory:
        """Its first `count` tokens, which are `text`."""
        return dataclasses.replace(
            self,
            text=text,
            tokens=self.tokens[:count],
            loss_mask=self.loss_mask[:count],
            log_probs=self.log_probs[:count],
        )

    def masked(self, count: int) -> Trajectory:
        """With its first `count` tokens taken out of the loss."""
        return dataclasses.replace(
            self,
            loss_mask=(*[0] * count, *self.loss_mask[count:]),
            log_probs=(*[0.0] * count, *self.log_probs[count:]),
        )

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class Session:
    """The answers of one session, each with everything before it: a client may go back and take another path."""

    def __init__(self) -> None:
        self.used = time.monotonic()
        self._turns: list[tuple[Trajectory, Trajectory]] = []  # as it was sampled, and as the client saw it

    def longest_prefix(self, text: str) -> Trajectory:
        """The longest known text that `text` begins with; an empty trajectory where none is known."""
        known = (form for turn in self._turns for form in turn if text.startswith(form.text))
        return max(known, key=lambda form: len(form.text), default=Trajectory())

    def add(self, trajectory: Trajectory, shown: Trajectory) -> None:
        """Keep an answer: as it was sampled, and as the client has seen it, without special tokens at its end."""
        self._turns = [turn for turn in self._turns if turn[0].text != trajectory.text]
        self._turns.append((trajectory, shown))

    @property
    def leaves(self) -> list[Trajectory]:
        """The trajectories that none goes on from, in the order of their last answers.

        What a trajectory shares with an earlier one has loss mask 0: each sampled token is trained once.
        """
        found: list[Trajectory] = []
        for whole, shown in self._turns:
            if not any(other is not whole and _begins(other, shown) for other, _ in self._turns):
                found.append(whole.masked(max((_shared(whole, earlier) for earlier in found), default=0)))
        return found


def _begins(longer: Trajectory, shorter: Trajectory) -> bool:
    count = len(shorter.tokens)
    return len(longer.tokens) > count and longer.tokens[:count] == shorter.tokens


def _shared(one: Trajectory, other: Trajectory) -> int:
    """Tokens at the beginning of both."""
    pairs = enumerate(zip(one.tokens, other.tokens, strict=False))
    return next((index for index, (left, right) in pairs if left != right), min(len(one.tokens), len(other.tokens)))


class SessionStore:
    """All sessions of a router.

    Args:
        tokenizer: of the model behind it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        self._sessions: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def session(self, name: str) -> Session:
        """An old or a new one."""
        session = self._sessions.setdefault(name, Session())
        session.used = time.monotonic()
        return session

    def get(self, name: str) -> Session | None:
        return self._sessions.get(name)

    def drop(self, name: str) -> bool:
        return self._sessions.pop(name, None) is not None

    def forget_idle(self) -> int:
        """Drop the sessions that nobody has used for SESSION_IDLE_SECONDS; how many."""
        limit = time.monotonic() - SESSION_IDLE_SECONDS
        idle = [name for name, session in self._sessions.items() if session.used < limit]
        for name in idle:
            del self._sessions[name]
        return len(idle)

    def tokenised(self, session: Session, text: str) -> tuple[Trajectory, int]:
        """The text with its tokens, and how many of them are known ones; only what is new is encoded."""
        known = session.longest_prefix(text)
        rest = text[len(known.text) :]
        new = self._tokenizer.encode(rest, add_special_tokens=False) if rest else []
        return known.extended(rest, new), len(known.tokens)

    def shown(self, trajectory: Trajectory) -> Trajectory:
        """An answered trajectory as its client sees it: without the special tokens at its end."""
        count = len(trajectory.tokens)
        while count and trajectory.loss_mask[count - 1] and trajectory.tokens[count - 1] in self._special:
            count -= 1
        tail = self._tokenizer.decode(trajectory.tokens[count:], skip_special_tokens=False)
        if not tail or not trajectory.text.endswith(tail):
            return trajectory
        return trajectory.cut(trajectory.text[: -len(tail)], count)
