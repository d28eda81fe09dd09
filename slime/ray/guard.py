"""Child processes that never outlive the process that owns them.

A server started straight from a Ray worker survives when that worker is SIGKILLed. So a small supervisor stands
between them: it holds one end of a pipe, and when the owner's end closes, however the owner ended, it kills the
whole tree.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_SUPERVISOR = Path(__file__).with_name("guard_supervisor.py")
_TAIL_BYTES = 64 * 1024


class GuardedProcess:
    """A running command whose process tree ends with its owner.

    Attributes:
        log_path: the file that holds the command's standard output and error.
    """

    def __init__(self, supervisor: subprocess.Popen[bytes], log_path: Path) -> None:
        self._supervisor = supervisor
        self.log_path = log_path

    @property
    def pid(self) -> int:
        """Id of the process in front; the supervisor is its child, and the command the supervisor's."""
        return self._supervisor.pid

    def poll(self) -> int | None:
        """Exit status (negative: the number of the signal that ended it), or None while it runs."""
        return self._supervisor.poll()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; raises subprocess.TimeoutExpired."""
        return self._supervisor.wait(timeout)

    def terminate(self, timeout: float = 0.0) -> int:
        """End the whole tree: SIGTERM and, `timeout` seconds later, SIGKILL; at once when `timeout` is 0.

        Returns:
            The exit status. Calling it again returns the same one.
        """
        assert self._supervisor.stdin is not None
        if self._supervisor.poll() is None:
            request = b"KILL\n" if timeout <= 0 else f"TERM {timeout}\n".encode()
            try:
                self._supervisor.stdin.write(request)
                self._supervisor.stdin.flush()
            except BrokenPipeError:  # it ended meanwhile
                pass
        self._supervisor.wait(timeout + 30.0)
        self._supervisor.stdin.close()
        return self._supervisor.returncode

    def log_tail(self, lines: int = 30) -> str:
        """The last lines that the command wrote."""
        return tail(self.log_path, lines)


def spawn_guarded(
    command: Sequence[str],
    env: Mapping[str, str] | None = None,
    log_path: str | os.PathLike[str] = os.devnull,
    scratch: bool = False,
) -> GuardedProcess:
    """Start `command` in a session of its own, with its output appended to `log_path`.

    Args:
        command: program and arguments.
        env: the complete environment, or None for this process's.
        log_path: missing folders are made.
        scratch: give the command a temporary folder of its own, which is removed when it has ended.
    """
    path = Path(log_path)
    if str(path) != os.devnull:
        path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as log:
        supervisor = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_SUPERVISOR), str(os.getpid()), "01"[scratch], *command],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=None if env is None else dict(env),
            start_new_session=True,
        )
    return GuardedProcess(supervisor, path)


def tail(path: str | os.PathLike[str], lines: int = 30) -> str:
    """The last lines of a text file; empty when there is none."""
    file_path = Path(path)
    if not file_path.is_file():
        return ""
    with file_path.open("rb") as file:
        file.seek(max(0, file_path.stat().st_size - _TAIL_BYTES))
        text = file.read().decode(errors="replace")
    return "\n".join(text.splitlines()[-lines:])
