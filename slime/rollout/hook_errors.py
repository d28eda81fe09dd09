"""Names the hook and the sample in an error that a user's function raised."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from slime.utils.misc import iter_leaves
from slime.utils.types import Sample

NAMED_SAMPLES = 4


@contextmanager
def hook_errors(path: str | None, subject: Any = None) -> Iterator[None]:
    """Add a note to what is raised inside: "in hook.path, for sample 3 (group 1, prompts.jsonl:12)".

    Args:
        path: the hook; None for code of slime's own, which says itself what it is about.
        subject: the sample, or lists of samples, that the hook was called with.
    """
    try:
        yield
    except Exception as error:
        if path is not None:
            error.add_note(f"in {path}{_subject(subject)}")
        raise


def _subject(subject: Any) -> str:
    samples = [leaf for leaf in iter_leaves(subject) if isinstance(leaf, Sample)]
    if not samples:
        return ""
    names = ", ".join(sample.name() for sample in samples[:NAMED_SAMPLES])
    more = f" and {len(samples) - NAMED_SAMPLES} more" if len(samples) > NAMED_SAMPLES else ""
    return f", for {names}{more}"
