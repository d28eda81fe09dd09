"""The whole of `python -m slime.doctor` where the tests run: a run can start here."""

from __future__ import annotations

import json

from tests.unit.test_doctor import run_doctor


def test_a_run_can_start_here() -> None:
    result = run_doctor("slime.doctor", "--json")
    findings = json.loads(result.stdout)
    failed = [finding for finding in findings if finding["status"] == "fail"]
    assert (result.returncode, failed) == (0, [])
    subjects = {finding["subject"] for finding in findings}
    assert {"device", "packages", "memory", "ports", "trainer", "engine", "router", "ray cluster"} <= subjects
