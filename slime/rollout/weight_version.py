"""Which weights the engines have, and how many updates ago a group's tokens were sampled."""

from __future__ import annotations

from typing import Any

from slime.rollout.engine_abort import worker_urls
from slime.utils.http_utils import get
from slime.utils.misc import iter_leaves
from slime.utils.types import Sample

LOADED_BY_ENGINE = "default"  # SGLang's name for the weights that it started with: before the first update
BORN_KEY = "born_weight_version"  # in metadata: the oldest version, for samples of an earlier process
CARRIED_KEY = "carried_staleness"  # in metadata of saved samples: version numbers begin anew in the next process


def version_number(version: str) -> int:
    """Updates until this version.

    Raises:
        ValueError: it is no number, so that staleness can't be counted.
    """
    if version == LOADED_BY_ENGINE:
        return 0
    try:
        return int(version)
    except ValueError:
        raise ValueError(f"weight version {version!r} of an engine is no number: staleness can't be counted") from None


async def current_weight_version(args: Any) -> int:
    """The newest version that an engine behind the router has.

    Raises:
        HttpError: an engine does not answer.
    """
    infos = [await get(f"{url}/model_info") for url in await worker_urls(args)]
    return max((version_number(info["weight_version"]) for info in infos), default=0)


def oldest_version(group: Any) -> int | None:
    """The oldest weights that made a token of the group; None where no engine made any."""
    versions = [number for sample in iter_leaves(group) for number in _versions(sample)]
    return min(versions, default=None)


def newest_version(group: Any) -> int:
    """The newest weights of this process's engines that made a token of the group; 0 where they made none."""
    own = [sample for sample in iter_leaves(group) if BORN_KEY not in sample.metadata]
    return max((version_number(version) for sample in own for version in sample.weight_versions), default=0)


def carry_staleness(samples: list[dict[str, Any]], staleness: int) -> None:
    """Note in samples that are being saved how stale they are, for the process that loads them."""
    for sample in samples:
        sample["metadata"] = {**sample["metadata"], CARRIED_KEY: staleness}


def adopt(group: Any, current: int) -> None:
    """Translate what `carry_staleness` noted into this process's version numbers."""
    for sample in iter_leaves(group):
        if CARRIED_KEY in sample.metadata:
            sample.metadata[BORN_KEY] = current - sample.metadata.pop(CARRIED_KEY)


def _versions(sample: Sample) -> list[int]:
    if BORN_KEY in sample.metadata:
        return [sample.metadata[BORN_KEY]]
    return [version_number(version) for version in sample.weight_versions]
