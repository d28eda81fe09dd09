"""A grader process: reads jobs from stdin, writes verdicts to stdout, ends when stdin closes.

Messages are pickles with a length in front. `("load", rm_type)` imports what the type needs; `("grade", limit_s,
rm_type, boxed, response, label, metadata)` scores one response. The answer is ("ok", value), or a text with "row" (the
row can't be graded), "unavailable" (something isn't installed) or "error" (the grader raised).
"""

from __future__ import annotations

import os
import pickle
import resource
import signal
import struct
import sys
from typing import IO, Any

MEMORY_LIMIT_BYTES = 4 << 30
HEADER = struct.Struct("!I")


def write_message(stream: IO[bytes], message: Any) -> None:
    """Send one message."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    stream.write(HEADER.pack(len(body)) + body)
    stream.flush()


def read_message(stream: IO[bytes]) -> Any:
    """Receive one message; EOFError when the other side is gone."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        raise EOFError
    (length,) = HEADER.unpack(header)
    body = stream.read(length)
    if len(body) < length:
        raise EOFError
    return pickle.loads(body)


def failure_verdict(error: BaseException) -> tuple[str, str]:
    """What is told of a grading that raised."""
    from slime.rollout.rm_hub.errors import MissingResource, UngradableRow

    if isinstance(error, UngradableRow):
        return "row", str(error)
    if isinstance(error, MissingResource):
        return "unavailable", str(error)
    return "error", f"{type(error).__name__}: {error}"[:2000]


def main() -> None:
    from slime.rollout.rm_hub.graders import GRADERS, grade

    jobs, verdicts = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what graders print must not mix with the verdicts
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # an alarm kills
    while True:
        try:
            kind, *job = read_message(jobs)
        except EOFError:
            return
        try:
            if kind == "load":
                GRADERS[job[0]].load()
                value: Any = None
            else:
                limit, *call = job
                # Ends this process even in C code that never returns, should the owner be gone by then.
                signal.setitimer(signal.ITIMER_REAL, 2 * limit + 1)
                value = grade(*call)
            verdict = ("ok", value)
        except BaseException as error:  # a grader may raise anything, also SystemExit
            verdict = failure_verdict(error)
        signal.setitimer(signal.ITIMER_REAL, 0)
        write_message(verdicts, verdict)


if __name__ == "__main__":
    sys.setrecursionlimit(3000)
    main()
