"""Instruction following: does a response keep to the instructions that its row lists (IFEval, IFBench)?

The checks are those of the benchmarks, from the package if-verifiable (`pip install 'slime[ifbench]'`). Some of them
need NLTK's data, which that package downloads at its first import; where it can't, only the types that need the data
are refused.
"""

from __future__ import annotations

import difflib
import fcntl
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from slime.rollout.rm_hub.errors import MissingResource, UngradableRow

NLTK_DATA = "python -m nltk.downloader punkt punkt_tab averaged_perceptron_tagger_eng stopwords"


def compute_ifbench_reward(response: str, label: Any, metadata: dict[str, Any] | None = None) -> float:
    """1.0 when the response keeps to every instruction as the benchmarks' strict mode checks it, else 0.0.

    Args:
        response: only what follows the last `</think>` counts.
        label: where the metadata has no instructions, they may stand here, as a dict or its JSON.
        metadata: `instruction_id_list`, `kwargs` (one dict per instruction; None values are ignored), `prompt_text`.

    Raises:
        UngradableRow: the row has no instructions, an unknown one, or not one `kwargs` each.
        MissingResource: a check needs NLTK data that isn't there.
    """
    row = _row(label, metadata or {})
    text = response.rsplit("</think>", 1)[-1].strip()
    checks = [_check(name, kwargs, row.get("prompt_text")) for name, kwargs in _instructions(row)]
    try:
        return float(bool(text) and all(check.check_following(text) for check in checks))
    except LookupError as error:
        if isinstance(error, (KeyError, IndexError)):
            raise
        # NLTK's message names the data and where it looked
        raise MissingResource(f"a check of rm type ifbench needs NLTK data; get it with: {NLTK_DATA}") from error


@cache
def instruction_checks() -> dict[str, Any]:
    """Instruction id → its check, of IFEval and IFBench together."""
    try:
        with _one_process_at_a_time():  # its first import fetches NLTK's data
            import langdetect
            from if_verifiable.ifbench.instructions_registry import INSTRUCTION_DICT as IFBENCH
            from if_verifiable.ifeval.instructions_registry import INSTRUCTION_DICT as IFEVAL
    except ImportError as error:
        raise MissingResource(f"rm type ifbench needs its checks: pip install 'slime[ifbench]' ({error})") from error

    langdetect.DetectorFactory.seed = 0  # else it guesses differently each time
    return {**IFEVAL, **IFBENCH}


@contextmanager
def _one_process_at_a_time() -> Iterator[None]:
    with open(Path(tempfile.gettempdir()) / f"slime-ifbench-{os.getuid()}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _row(label: Any, metadata: dict[str, Any]) -> Mapping[str, Any]:
    if metadata.get("instruction_id_list"):
        return metadata
    try:
        parsed = json.loads(label) if isinstance(label, str) else label
    except json.JSONDecodeError:
        parsed = None
    if isinstance(parsed, Mapping) and parsed.get("instruction_id_list"):
        return parsed
    raise UngradableRow(f"rm type ifbench needs metadata with instruction_id_list; it has {sorted(metadata)}")


def _instructions(row: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    names = list(row["instruction_id_list"])
    arguments = row.get("kwargs")
    arguments = [{}] * len(names) if arguments is None else list(arguments)
    if len(arguments) != len(names):
        raise UngradableRow(f"{len(arguments)} kwargs for {len(names)} instructions in instruction_id_list")
    known = instruction_checks()
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            raise UngradableRow(f"unknown instruction {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    given = [{key: value for key, value in (kwargs or {}).items() if value is not None} for kwargs in arguments]
    return list(zip(names, given, strict=True))


def _check(name: str, kwargs: dict[str, Any], prompt: str | None) -> Any:
    check = instruction_checks()[name](name)
    try:
        check.build_description(**kwargs)
    except (TypeError, ValueError, AttributeError) as error:
        raise UngradableRow(f"instruction {name!r} doesn't take kwargs {kwargs}: {error}") from error
    if "prompt" in (check.get_instruction_args() or {}):
        if not prompt:
            raise UngradableRow(f"instruction {name!r} needs metadata.prompt_text")
        check.build_description(prompt=prompt)
    return check
