"""What a check has found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "note", "fail"]
_MARKS = {"ok": "ok  ", "note": "note", "fail": "FAIL"}


@dataclass(frozen=True)
class Finding:
    """One line of the report. A run can start when nothing has failed.

    Attributes:
        fix: the command or setting that helps; empty where nothing is wrong.
    """

    status: Status
    subject: str
    text: str
    fix: str = ""


def report(findings: Iterable[Finding]) -> str:
    """One line per finding, and below it what helps."""
    lines = []
    for finding in findings:
        lines.append(f"{_MARKS[finding.status]}  {finding.subject}: {finding.text}")
        if finding.fix:
            lines.append(f"      -> {finding.fix}")
    return "\n".join(lines)


def can_start(findings: Iterable[Finding]) -> bool:
    return all(finding.status != "fail" for finding in findings)
