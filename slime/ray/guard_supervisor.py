"""Runs one command and makes sure that nothing of it outlives its owner (started by `slime.ray.guard`; stdlib only).

    python -I -S guard_supervisor.py OWNER_PID SCRATCH COMMAND...

Standard input is a pipe that the owner holds open. When it closes, or the owner is gone, every process that the
command started is killed. The process that the owner starts only stands in front of the one that supervises.
The supervisor adopts orphans (PR_SET_CHILD_SUBREAPER), so a descendant that began a session of its own is found
too. With SCRATCH 1 the command's TMPDIR is a folder that is removed at the end. A line on the pipe asks for an
end: `TERM seconds` (SIGTERM first) or `KILL`.
"""

import contextlib
import ctypes
import os
import select
import signal
import sys
import tempfile
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_SECONDS = 0.25
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the owner decides when the supervisor ends


def prctl(option: int, value: int) -> None:
    """Linux only; elsewhere the supervisor still kills the process group."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def descendants() -> dict[int, int]:
    """Every living process below this one, children before grandchildren, with its process group."""
    if not os.path.isdir("/proc"):
        return {}
    children: dict[int, list[int]] = {}
    groups: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        if fields[0] != b"Z":
            children.setdefault(int(fields[1]), []).append(int(entry))
            groups[int(entry)] = int(fields[2])
    found: list[int] = []
    queue = [os.getpid()]
    while queue:
        below = children.get(queue.pop(0), [])
        found += below
        queue += below
    return {pid: groups[pid] for pid in found}


def send(signum: int, group: int) -> None:
    """Signal the command's process group and whatever left it; each process once."""
    left = [(os.kill, pid) for pid, own_group in descendants().items() if own_group != group]
    targets = [(os.killpg, group), *left]
    for kill, target in targets:
        with contextlib.suppress(ProcessLookupError):
            kill(target, signum)


def reap(command: int) -> int | None:
    """Collect ended processes; the command's exit status once it has one (negative: the signal's number)."""
    status = None
    while True:
        try:
            pid, raw = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if pid == 0:
            return status
        if pid == command:
            status = os.waitstatus_to_exitcode(raw)


def start(command: list[str]) -> int:
    """Fork the command into a session of its own; it dies with this supervisor."""
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for signum in IGNORED:
        signal.signal(signum, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"cannot start {command[0]}: {error}\n".encode())
        os._exit(127)


def end_all(command: int, seconds: float) -> int:
    """SIGTERM, then after `seconds` SIGKILL, to everything below; the command's exit status."""
    status = None
    deadline = time.monotonic() + seconds
    if seconds > 0:
        send(signal.SIGTERM, command)
        while time.monotonic() < deadline and descendants():
            ended = reap(command)
            status = status if ended is None else ended
            time.sleep(0.02)
    give_up = time.monotonic() + 10.0
    while True:
        send(signal.SIGKILL, command)
        time.sleep(0.01)
        ended = reap(command)
        status = status if ended is None else ended
        if not descendants() or time.monotonic() > give_up:
            return -signal.SIGKILL if status is None else status


def supervise(front: int, arguments: list[str]) -> int:
    """Wait until the command ends, the owner asks for its end, or owner or front is gone; the command's status."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    command = start(arguments)
    while True:
        readable, _, _ = select.select([0], [], [], POLL_SECONDS)
        status = reap(command)
        if status is not None:
            end_all(command, 0.0)
            return status
        if readable:
            request = os.read(0, 64).split()
            return end_all(command, float(request[1]) if request[:1] == [b"TERM"] else 0.0)
        if os.getppid() != front:
            return end_all(command, 0.0)


def supervise_with_scratch(front: int, arguments: list[str]) -> int:
    """Like `supervise`, with a TMPDIR whose path is short enough for the sockets in it."""
    with tempfile.TemporaryDirectory(prefix="slime-", ignore_cleanup_errors=True) as folder:
        os.environ["TMPDIR"] = folder
        return supervise(front, arguments)


def stand_in_front(owner: int, supervisor: int) -> int:
    """Wait for the supervisor; its exit status. Ends when the owner is gone, which ends the supervisor."""
    while True:
        signal.sigtimedwait([signal.SIGCHLD], POLL_SECONDS)
        pid, status = os.waitpid(supervisor, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if os.getppid() != owner:
            os._exit(1)


def leave(code: int) -> None:
    """Exit, by the same signal if the command ended by one, so that the owner sees what happened."""
    if code < 0:
        if -code in IGNORED:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def main(owner: int, scratch: bool, arguments: list[str]) -> None:
    """Fork the supervisor, so that it is no child of the owner: Ray kills the children of a worker that it kills."""
    for signum in IGNORED:
        signal.signal(signum, signal.SIG_IGN)
    front = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    supervisor = os.fork()
    if supervisor:
        leave(stand_in_front(owner, supervisor))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    leave(supervise_with_scratch(front, arguments) if scratch else supervise(front, arguments))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] == "1", sys.argv[3:])
