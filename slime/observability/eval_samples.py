"""The answers of an evaluation as jsonl, for people to read and scripts to compare."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from slime.utils.types import Sample

logger = logging.getLogger(__name__)


def save_eval_samples(log_dir: str | Path, rollout_id: int, data: Mapping[str, Mapping[str, Any]]) -> list[Path]:
    """Write `{log_dir}/eval/<data set>/<rollout_id>.jsonl`, a line per answer, for each data set with samples.

    Nothing is overwritten: a second evaluation of that id (before the first rollout, and after it) is `<id>-2.jsonl`.

    Args:
        data: data set name → {"rewards": numbers, "samples": Samples}, as an evaluation function returns it.

    Returns:
        The files, complete: a reader never sees half of one.
    """
    paths = []
    for name, result in data.items():
        if not result.get("samples"):
            continue
        path = _free_path(Path(log_dir) / "eval" / quote(name, safe=" "), rollout_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".jsonl.{os.getpid()}")
        with open(unfinished, "w", encoding="utf-8", errors="backslashreplace") as file:
            for row in _rows(result):
                file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
        os.replace(unfinished, path)
        paths.append(path)
    if paths:
        logger.info("saved the answers of evaluation %d: %s", rollout_id, ", ".join(map(str, paths)))
    return paths


def _free_path(folder: Path, rollout_id: int) -> Path:
    path, number = folder / f"{rollout_id}.jsonl", 1
    while path.exists():
        number += 1
        path = folder / f"{rollout_id}-{number}.jsonl"
    return path


def _rows(result: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    samples: list[Sample] = result["samples"]
    rewards = result["rewards"]
    for position, sample in enumerate(samples):
        yield {
            "index": sample.index,
            "group_index": sample.group_index,
            "prompt": sample.prompt,
            "response": sample.response,
            "label": sample.label,
            "reward": rewards[position] if len(rewards) == len(samples) else sample.reward,
            "reward_parts": sample.reward if isinstance(sample.reward, dict) else None,
            "status": sample.status.value,
            "response_length": sample.response_length,
            "weight_versions": sample.weight_versions,
            "metadata": sample.metadata,
        }
