"""`slime doctor`: each check on a machine where it fails, and the whole on this one."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slime.doctor.cluster import check_cluster, describe
from slime.doctor.device import check_device, check_parts
from slime.doctor.finding import Finding, can_start, report
from slime.doctor.machine import check_disk, check_limits, check_memory, check_ports
from slime.doctor.packages import check_packages, check_python, declared_requirements, problem_with

REPOSITORY = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = {
    "requires-python": ">=3.11,<3.12",
    "dependencies": ["ray[default]==2.60.0", "numpy", "winloop; sys_platform == 'win32'"],
    "optional-dependencies": {"cpu": ["gguf"], "cuda": ["sglang==0.5.23"], "examples": ["matplotlib"]},
}
FITTING = {"ray": "2.60.0", "numpy": "2.0", "gguf": "1", "sglang": "0.5.23", "matplotlib": "3"}


def packages(device: str = "cpu", **changed: str | None) -> list[Finding]:
    return list(check_packages(PROJECT, device, {**FITTING, **changed}.get))


def test_fitting_packages() -> None:
    (finding,) = packages()
    assert finding.status == "ok"
    assert "ray 2.60.0" in finding.text and "sglang 0.5.23" in finding.text


def test_missing_and_wrong_packages() -> None:
    found = {finding.text: finding for finding in packages(ray="2.59.0", gguf=None)}
    assert set(found) == {"ray is 2.59.0, slime needs ==2.60.0", "gguf is not installed"}
    assert all(finding.status == "fail" for finding in found.values())
    assert "pip install 'gguf'" in found["gguf is not installed"].fix


def test_sglang_on_a_cpu_is_installed_alone() -> None:
    (finding,) = packages(sglang=None)
    assert (finding.status, finding.text) == ("fail", "sglang is not installed")
    assert "pip install --no-deps 'sglang==0.5.23'" in finding.fix


def test_other_extras_are_only_noted() -> None:
    (_, note) = packages(matplotlib=None)
    assert (note.status, note.subject, note.fix) == ("note", "extra 'examples'", "pip install -e '.[examples]'")
    assert [finding.status for finding in packages("cuda", gguf=None)] == ["ok"]


def test_python_version() -> None:
    assert check_python(PROJECT, "3.11.9").status == "ok"
    assert check_python(PROJECT, "3.12.1").status == "fail"


def test_this_installation_fits_the_project() -> None:
    project = declared_requirements()
    assert [line for line in project["dependencies"] if problem_with(line, lambda name: None)] != []
    assert all(finding.status != "fail" for finding in check_packages(project, "cpu"))


def test_device(monkeypatch: pytest.MonkeyPatch) -> None:
    (finding,) = check_device()
    assert finding.status == "ok" and "gloo" in finding.text


def test_memory() -> None:
    gib = 1024**3
    assert [check_memory(size * gib).status for size in (1, 8, 64)] == ["fail", "note", "ok"]


def test_disk(tmp_path: Path) -> None:
    missing = tmp_path / "not" / "there"
    assert check_disk("disk", missing, 1, "").status == "ok"
    full = check_disk("disk", missing, 1 << 60, "set TMPDIR")
    assert (full.status, full.fix) == ("fail", "set TMPDIR")


def test_limits_and_ports() -> None:
    assert [check_limits(number).status for number in (1024, 65536, -1)] == ["note", "ok", "ok"]
    assert check_ports().status == "ok"


def test_parts_that_break() -> None:
    found = list(
        check_parts({"good": "import json", "bad": "import nowhere", "late": "import time; time.sleep(60)"}, 5)
    )
    assert [finding.status for finding in found] == ["ok", "fail", "fail"]
    assert "No module named 'nowhere'" in found[1].text and "within 5 s" in found[2].text


def test_cluster_resources() -> None:
    assert describe({"CPU": 8.0}, {"CPU": 3.0}, 1).text == "1 node(s), free: 3 of 8 CPU"
    assert describe({"CPU": 8.0}, {}, 1).status == "note"
    assert describe({}, {}, 1).status == "fail"


def test_cluster_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{sock.getsockname()[1]}")
        finding = check_cluster(seconds=3)
    assert finding.status == "fail" and "RAY_ADDRESS=127.0.0.1" in finding.fix


def test_report_and_status() -> None:
    findings = [Finding("ok", "a", "fine"), Finding("fail", "b", "broken", "mend it")]
    assert report(findings).splitlines() == ["ok    a: fine", "FAIL  b: broken", "      -> mend it"]
    assert not can_start(findings) and can_start(findings[:1])


def run_doctor(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    import os

    command = [sys.executable, "-m", *words]
    return subprocess.run(
        command, cwd=REPOSITORY, env={**os.environ, **env}, capture_output=True, text=True, timeout=400
    )


def test_a_device_that_is_not_there() -> None:
    """Status 1 at once; and both spellings of the command are the same."""
    for words in (("slime.doctor", "--json"), ("slime", "doctor", "--json")):
        result = run_doctor(*words, SLIME_ACCELERATOR="npu")
        assert result.returncode == 1, result.stderr
        assert json.loads(result.stdout)[-1]["subject"] == "device"
    assert run_doctor("slime", "nonsense").returncode == 2
