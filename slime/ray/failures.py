"""How a failed run says what went wrong: one message on the terminal, everything in the driver's log."""

from __future__ import annotations

import logging
import re
import sysconfig
import traceback
from argparse import Namespace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayTaskError

import slime

logger = logging.getLogger(__name__)
log_only = logging.getLogger("traceback")  # its INFO lines are written to the file and not shown

_FRAME = re.compile(r'^ *File "(?P<file>[^"]+)", line \d+, in \S+\n(?: {4,}.*\n)*', re.MULTILINE)
_REMOTE = re.compile(r"ray::(?P<call>[\w.]+)\(")
_IDLE_LINES = ("actor_id:", "namespace:", "name:", "pid:")
_FOREIGN = ("site-packages", "dist-packages", "<frozen", "<string>", "ray/_raylet")


def report_failure(args: Namespace, error: BaseException) -> None:
    """Say on the terminal what failed, where, and in which line of the user's code; the traceback goes to the log."""
    whole = "".join(traceback.format_exception(error))
    log_only.info("the run failed:\n%s", whole)
    lines = [f"the run failed: {describe(error)}"]
    frames = user_frames(whole)
    if frames:
        lines.append("in your code:\n" + "\n".join(frames))
    if (call := _REMOTE.search(whole)) is not None:
        lines.append(f"raised in {call['call']}")
    if getattr(args, "log_dir", None) is not None:
        lines.append(f"full traceback: {Path(args.log_dir) / 'driver.log'}")
    logger.error("%s", "\n".join(lines))


def describe(error: BaseException) -> str:
    """`Type: message` of what was raised first, with its notes and without Ray's wrapping."""
    first = root_cause(error)
    message = str(first).strip()
    if isinstance(first, ray.exceptions.RayActorError):
        kept = [line.strip() for line in message.splitlines() if not line.strip().startswith(_IDLE_LINES)]
        message = "\n".join(kept)
    notes = getattr(first, "__notes__", [])
    return "\n".join([f"{type(first).__name__}: {message}", *(f"  {note}" for note in notes)])


def summary(error: BaseException) -> str:
    """The first line of `describe`, where the run goes on: without the log that an engine's error carries."""
    return describe(error).splitlines()[0]


def root_cause(error: BaseException) -> Any:
    """The exception inside Ray's task errors, of the innermost task."""
    while isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        error = error.cause
    return error


def user_frames(text: str) -> list[str]:
    """The frames of a traceback that are in neither slime, Ray, the standard library nor an installed package."""
    own = str(Path(slime.__file__).parent)
    foreign = (own, sysconfig.get_paths()["stdlib"])
    frames = []
    for match in _FRAME.finditer(text):
        file = match["file"]
        if file.startswith(foreign) or any(part in file for part in _FOREIGN) or _is_driver(file):
            continue
        frame = match[0].rstrip("\n")
        if frame not in frames:
            frames.append(frame)
    return frames


def _is_driver(file: str) -> bool:
    root = Path(slime.__file__).parents[1]
    return Path(file) in (root / "train.py", root / "train_async.py")
