"""--max-restarts: a run that fails is started again, from its last checkpoint."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from argparse import Namespace

from slime.ray.cluster import STOPPED_STATUS
from slime.utils.arguments.rules.loading import is_megatron_checkpoint, saved_iteration

logger = logging.getLogger(__name__)

_SUPERVISED = "SLIME_RUN_IS_SUPERVISED"
_USAGE_STATUS = 2
_PR_SET_PDEATHSIG = 1


def supervise(args: Namespace) -> None:
    """With --max-restarts, run this very command in a child process, again and again while it fails, then exit.

    Returns at once in that child, and without the flag.

    The child is a process of its own so that nothing of a failed run, such as its connection to Ray or a library in a
    bad state, is left in the next. It ends like the others when this process is killed.

    Raises:
        SystemExit: with the last run's status. Ctrl-C and errors of the command line are not tried again.
    """
    if os.environ.get(_SUPERVISED):
        _end_with_parent()
        return
    if not args.max_restarts:
        return
    stopped = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: stopped.set())  # Ctrl-C reaches the child too, which ends the run
    command = [sys.executable, *sys.orig_argv[1:], "--log-dir", args.log_dir]
    first_checkpoint = _checkpoint(args)
    for left in range(args.max_restarts, -1, -1):
        status = _run(command)
        if stopped.is_set():
            raise SystemExit(STOPPED_STATUS)
        if status in (0, _USAGE_STATUS, STOPPED_STATUS, -signal.SIGTERM):
            break
        logger.error("the run ended with status %d; %d of %d restarts are left", status, left, args.max_restarts)
        if _checkpoint(args) != first_checkpoint and left:
            logger.warning("it goes on from the checkpoint of rollout %s in %s", _checkpoint(args), args.save)
            command += ["--load", args.save, "--no-finetune"]
            first_checkpoint = None
    raise SystemExit(status if status >= 0 else 128 - status)


def _checkpoint(args: Namespace) -> int | None:
    """The newest rollout that --save has a checkpoint of."""
    return saved_iteration(args.save) if is_megatron_checkpoint(args.save) else None


def _run(command: list[str]) -> int:
    began = time.monotonic()
    child = subprocess.Popen(command, env={**os.environ, _SUPERVISED: "1"})
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    status = child.wait()
    logger.info("the run took %.0f s", time.monotonic() - began)
    return status


def _end_with_parent() -> None:
    """Linux: SIGTERM, which ends a run like Ctrl-C, when the supervising process is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
