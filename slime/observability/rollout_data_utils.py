"""Dumps of rollouts: written with --save-debug-rollout-data, replayed with --load-debug-rollout-data."""

from __future__ import annotations

import logging
from pathlib import Path

from slime.utils.types import Sample

logger = logging.getLogger(__name__)


def save_debug_rollout_data(
    path_template: str, samples: list[Sample], *, rollout_id: int, evaluation: bool = False
) -> Path:
    """Write {"rollout_id", "samples"} to the path; `{rollout_id}` in it becomes the id, `eval_<id>` in evaluation."""
    import torch

    path = _path(path_template, rollout_id, evaluation)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"rollout_id": rollout_id, "samples": [sample.to_dict() for sample in samples]}, path)
    logger.info("saved %d samples of rollout %d to %s", len(samples), rollout_id, path)
    return path


def load_debug_rollout_data(
    path_template: str, *, rollout_id: int, subsample_ratio: float | None = None, evaluation: bool = False
) -> list[Sample]:
    """The samples of a dump, or that fraction of them: half from its head, half from its tail.

    Raises:
        FileNotFoundError: there is no dump of this rollout.
    """
    import torch

    path = _path(path_template, rollout_id, evaluation)
    if not path.is_file():
        raise FileNotFoundError(f"no rollout dump {str(path)!r} (--load-debug-rollout-data {path_template})")
    samples = torch.load(path, weights_only=False)["samples"]  # our own file; samples may hold any object
    if subsample_ratio is not None:
        wanted = max(1, round(len(samples) * subsample_ratio))
        head = wanted - wanted // 2
        samples = samples[:head] + samples[len(samples) - (wanted - head) :]
    return [Sample.from_dict(sample) for sample in samples]


def _path(template: str, rollout_id: int, evaluation: bool) -> Path:
    return Path(template.format(rollout_id=f"eval_{rollout_id}" if evaluation else rollout_id))
