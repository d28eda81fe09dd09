"""The check that no process outlives the tests."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.leftovers import describe, kill, marked_processes, wait_until_none


def test_a_daemon_that_left_its_parent_is_found() -> None:
    marker = "SLIME_TEST_OF_LEFTOVERS"
    code = "import subprocess, sys; print(subprocess.Popen(['sleep', '60'], start_new_session=True).pid)"
    env = {**os.environ, marker: "here"}
    # Output to a pipe that the daemon also holds: read one line, don't wait for its end.
    parent = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    daemon = int(parent.stdout.readline())
    parent.wait()
    parent.stdout.close()
    (found,) = marked_processes(marker, "here")
    assert found.pid == daemon and "sleep 60" in describe([found])
    assert marked_processes(marker, "elsewhere") == []
    kill([found])
    assert wait_until_none(lambda: marked_processes(marker, "here"), 5.0) == []
