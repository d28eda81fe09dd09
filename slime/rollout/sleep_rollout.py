"""A rollout function that does nothing for ever: the engines stay up for whoever wants to talk to them."""

from __future__ import annotations

import logging
import time
from typing import Any, NoReturn

logger = logging.getLogger(__name__)


def sleep(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> NoReturn:
    """Never returns."""
    while True:
        logger.info("sleeping in rollout %d; the engines are serving", rollout_id)
        time.sleep(3600)
