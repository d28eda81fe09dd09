"""The command: every check, a line for each, and a status that says whether a run can start."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence

from slime.doctor.cluster import check_cluster
from slime.doctor.device import check_device, check_parts
from slime.doctor.finding import Finding, can_start, report
from slime.doctor.machine import check_disks, check_limits, check_memory, check_ports
from slime.doctor.packages import check_packages, check_python, declared_requirements


def examine() -> Iterator[Finding]:
    """All checks, cheap ones first."""
    from slime.utils import accelerator

    project = declared_requirements()
    yield check_python(project)
    device = list(check_device())
    yield from device
    if not can_start(device):
        return
    yield from check_packages(project, accelerator.current().name)
    yield check_memory()
    yield from check_disks()
    yield check_limits()
    yield check_ports()
    yield from check_parts()
    yield check_cluster()


def main(argv: Sequence[str] | None = None) -> int:
    """0 when a run can start, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m slime.doctor",
        description="Checks whether a run can start here; says what is missing and what to install.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    wanted = parser.parse_args(argv)
    findings = []
    for finding in examine():
        findings.append(finding)
        if not wanted.json:
            print(report([finding]), flush=True)
    if wanted.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        print("\nA run can start." if can_start(findings) else "\nA run can't start before the FAIL lines are solved.")
    return 0 if can_start(findings) else 1


if __name__ == "__main__":
    sys.exit(main())
