"""The driver's terminal: lines that stay, and below them one bar that is redrawn in place."""

from __future__ import annotations

import shutil
import threading
from typing import TextIO


class Terminal:
    """Writes lines and, on a tty, keeps a live status line under them. Safe to use from several threads."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.RLock()
        self._status = ""
        self.is_tty = stream.isatty()

    def line(self, text: str) -> None:
        """Print `text` above the status line."""
        with self._lock:
            self._erase()
            self._stream.write(text + "\n")
            self._draw()
            self._stream.flush()

    def status(self, text: str) -> None:
        """Replace the status line; "" removes it. Does nothing where the stream is not a tty."""
        if not self.is_tty:
            return
        width = shutil.get_terminal_size().columns - 1
        with self._lock:
            if text[:width] == self._status:
                return
            self._erase()
            self._status = text[:width]
            self._draw()
            self._stream.flush()

    def _erase(self) -> None:
        if self._status:
            self._stream.write("\r\x1b[2K")

    def _draw(self) -> None:
        if self._status:
            self._stream.write(self._status)
