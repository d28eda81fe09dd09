"""After a weight sync by files."""

from __future__ import annotations

import logging
from argparse import Namespace
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


def list_files(args: Namespace, version_dir: str, rollout_engines: list[Any]) -> None:
    """Called on every rank when the files of a version are written, before the engines read them."""
    names = sorted(path.name for path in Path(version_dir).iterdir())
    logger.info("%s: %s for %d engines", version_dir, ", ".join(names), len(rollout_engines))
