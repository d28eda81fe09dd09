"""Installed packages against the versions that slime asks for."""

from __future__ import annotations

import importlib.metadata
import platform
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from slime.doctor.finding import Finding

# what runs need beside the base; the others make more possible
DEVICE_EXTRAS = ("cpu", "cuda", "npu")
# On these devices SGLang is installed without its own requirements, which bring CUDA.
_SGLANG_ALONE = ("cpu", "npu")
_SETUP = "bash scripts/setup.sh"
_PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"

VersionOf = Callable[[str], str | None]


def declared_requirements() -> dict[str, Any]:
    """`requires-python`, `dependencies` and `optional-dependencies` of slime.

    From pyproject.toml where slime runs from its source, else from the installed package.
    """
    if _PYPROJECT.is_file():
        return tomllib.loads(_PYPROJECT.read_text(encoding="utf-8"))["project"]
    metadata = importlib.metadata.metadata("slime")
    extras: dict[str, list[str]] = {extra: [] for extra in metadata.get_all("Provides-Extra") or []}
    base = []
    for line in importlib.metadata.requires("slime") or []:
        requirement = Requirement(line)
        owners = [extra for extra in extras if requirement.marker and requirement.marker.evaluate({"extra": extra})]
        plain = Requirement(line)
        plain.marker = None
        for extra in owners:
            extras[extra].append(str(plain))
        if not owners:
            base.append(line)
    return {
        "requires-python": metadata["Requires-Python"],
        "dependencies": base,
        "optional-dependencies": extras,
    }


def installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_python(project: Mapping[str, Any], version: str = platform.python_version()) -> Finding:
    wanted = project["requires-python"]
    if SpecifierSet(wanted).contains(version):
        return Finding("ok", "python", version)
    return Finding("fail", "python", f"{version}, but slime needs {wanted}", f"PYTHON=python3.11 {_SETUP}")


def check_packages(
    project: Mapping[str, Any], device: str, version_of: VersionOf = installed_version
) -> Iterator[Finding]:
    """Base packages and those of this device must fit; what other extras lack is only noted."""
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *extras.get(device, []), *_sglang(extras, device)]
    yield from _compare("packages", needed, version_of, f"{_SETUP}, or: ")
    for extra, lines in extras.items():
        if extra not in DEVICE_EXTRAS:
            missing = [line for line in lines if problem_with(line, version_of)]
            if missing:
                names = ", ".join(Requirement(line).name for line in missing)
                yield Finding("note", f"extra {extra!r}", f"without {names}", f"pip install -e '.[{extra}]'")


def _sglang(extras: Mapping[str, list[str]], device: str) -> list[str]:
    if device not in _SGLANG_ALONE:
        return []
    return [line for line in extras.get("cuda", []) if canonicalize_name(Requirement(line).name) == "sglang"]


def problem_with(line: str, version_of: VersionOf) -> str | None:
    """What is wrong with the installed package that `line` ("name==1.2") asks for; None where it fits."""
    requirement = Requirement(line)
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
        return None
    version = version_of(requirement.name)
    if version is None:
        return f"{requirement.name} is not installed"
    if not requirement.specifier.contains(version, prereleases=True):
        return f"{requirement.name} is {version}, slime needs {requirement.specifier}"
    return None


def _compare(subject: str, lines: list[str], version_of: VersionOf, prefix: str) -> Iterator[Finding]:
    wrong = 0
    for line in lines:
        problem = problem_with(line, version_of)
        if problem is not None:
            wrong += 1
            alone = "--no-deps " if canonicalize_name(Requirement(line).name) == "sglang" else ""
            yield Finding("fail", subject, problem, f"{prefix}pip install {alone}'{line}'")
    if not wrong:
        pinned = [f"{Requirement(line).name} {version_of(Requirement(line).name)}" for line in lines if "==" in line]
        yield Finding("ok", subject, f"{len(lines)} as needed; pinned: {', '.join(pinned)}")
