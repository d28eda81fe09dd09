"""Scores of the reasoning-gym library for the problems that it made."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from slime.rollout.rm_hub.errors import UngradableRow


def load_library() -> None:
    """Import reasoning_gym; it takes a second or more."""
    import reasoning_gym  # noqa: F401


def score_response(response: str, label: Any, metadata: dict[str, Any]) -> float:
    """The library's score in [0, 1] of the answer in `response`.

    The answer is what stands behind the last `</think>`, in the last `<answer>…</answer>` where there is one.

    Args:
        label: the expected answer, where the metadata has none.
        metadata: a reasoning-gym entry {question, answer, metadata: {source_dataset, …}}, that entry under "entry",
            or only the entry's inner metadata with its `source_dataset`.

    Raises:
        UngradableRow: see `find_entry`; or the library has no data set of that name.
    """
    from reasoning_gym.utils import extract_answer

    entry = find_entry(label, metadata)
    text = response.rsplit("</think>", 1)[-1]
    tagged = extract_answer(text)
    answer = tagged if tagged is not None else text.strip()
    return float(_scorer(entry["metadata"]["source_dataset"])(answer, entry))


def find_entry(label: Any, metadata: dict[str, Any]) -> dict[str, Any]:
    """The reasoning-gym entry that a sample's label and metadata make up.

    Raises:
        UngradableRow: there is no `source_dataset` or no answer in them.
    """
    entry = metadata.get("entry", metadata)
    inner = entry.get("metadata") if isinstance(entry.get("metadata"), dict) else entry
    source = inner.get("source_dataset") or entry.get("source_dataset") or metadata.get("source_dataset")
    answer = entry.get("answer", label)
    if source is None or answer is None:
        raise UngradableRow(
            f"rm_type reasoning_gym needs metadata with source_dataset and an answer; it has {sorted(metadata)}"
        )
    return {
        "question": entry.get("question", ""),
        "answer": answer,
        "metadata": {**inner, "source_dataset": source},
    }


@cache
def _scorer(source_dataset: str) -> Callable[[str, dict[str, Any]], float]:
    import reasoning_gym

    try:
        return reasoning_gym.get_score_answer_fn(source_dataset)
    except ValueError as error:  # no data set of this name
        raise UngradableRow(f"reasoning-gym: {error}") from error
