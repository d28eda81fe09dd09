"""Where a process's log goes: the driver's to the terminal, a worker's to its own file with only warnings shown."""

from __future__ import annotations

import logging
import sys
from argparse import Namespace
from pathlib import Path

from slime.observability.terminal import Terminal

DRIVER = "driver"
_FILE_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_TIME_FORMAT = "%Y-%m-%d %H:%M:%S"
# What their libraries say at every start and no user can act on.
_IDLE_WARNINGS = ("ray._private.authentication", "megatron.core.rerun_state_machine")
_OWN_LOGGERS = ("slime", "slime_plugins", "__main__", "train", "train_async")


class TerminalHandler(logging.Handler):
    """Writes records as lines of a `Terminal`, so that they don't tear its status line."""

    def __init__(self, terminal: Terminal) -> None:
        super().__init__()
        self.terminal = terminal

    def emit(self, record: logging.LogRecord) -> None:
        self.terminal.line(self.format(record))


def configure_logger(args: Namespace | None = None, role: str = DRIVER) -> None:
    """Set up this process's root logger; calling it again replaces the set-up.

    The driver shows its own INFO lines and everyone's warnings on stdout. A worker (any other `role`) shows warnings
    on stderr, marked with its role. With `args.log_dir` every process also writes all its INFO lines to
    `{log_dir}/{role}.log`. Python's `warnings` go to the file alone.
    """
    root = logging.getLogger()
    for handler in [*root.handlers]:
        root.removeHandler(handler)
        handler.close()
    root.setLevel(logging.INFO)
    for name in _IDLE_WARNINGS:
        logging.getLogger(name).setLevel(logging.ERROR)
    root.addHandler(_driver_handler() if role == DRIVER else _worker_handler(role))
    log_dir = getattr(args, "log_dir", None)
    if log_dir is not None:
        root.addHandler(_file_handler(Path(log_dir), role))
        logging.captureWarnings(True)


def terminal() -> Terminal:
    """The terminal that this process's log uses; a fresh one on stdout where none was configured."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, TerminalHandler):
            return handler.terminal
    return Terminal(sys.stdout)


def _driver_handler() -> logging.Handler:
    handler = TerminalHandler(Terminal(sys.stdout))
    handler.setFormatter(_TerminalFormatter(""))
    handler.addFilter(_shown_in_driver)
    return handler


def _worker_handler(role: str) -> logging.Handler:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_TerminalFormatter(f"[{role}] "))
    handler.setLevel(logging.WARNING)
    handler.addFilter(_is_not_python_warning)
    return handler


def _file_handler(log_dir: Path, role: str) -> logging.Handler:
    log_dir.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(log_dir / f"{role}.log", encoding="utf-8")
    handler.setFormatter(logging.Formatter(_FILE_FORMAT, _TIME_FORMAT))
    return handler


def _is_not_python_warning(record: logging.LogRecord) -> bool:
    return record.name != "py.warnings"


def _shown_in_driver(record: logging.LogRecord) -> bool:
    if record.levelno >= logging.WARNING:
        return _is_not_python_warning(record)
    return record.name.split(".", 1)[0] in _OWN_LOGGERS


class _TerminalFormatter(logging.Formatter):
    """`12:03:04 message`, with the level in front of the message from WARNING on."""

    def __init__(self, prefix: str) -> None:
        super().__init__(f"%(asctime)s {prefix}%(message)s", "%H:%M:%S")
        self._loud = logging.Formatter(f"%(asctime)s {prefix}%(levelname)s: %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        return self._loud.format(record) if record.levelno >= logging.WARNING else super().format(record)
