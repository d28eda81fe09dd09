"""Import hook that applies `source_rules` to `megatron.core.*` while it is imported; nothing on disk changes.

The rewritten modules' byte code is kept in the user's cache directory, one folder per megatron-core version and state
of the rules, because every trainer process imports them.
"""

from __future__ import annotations

import hashlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from slime.backends.megatron_utils.cpu import source_rules

PACKAGE = "megatron.core"


def install() -> None:
    """Prepare this process for importing megatron-core on a CPU. Does nothing the second time.

    Raises:
        RuntimeError: megatron-core is already imported without the hook, or its version is not the one that the rules
            were written for.
        PackageNotFoundError: megatron-core is not installed.
    """
    if any(isinstance(finder, MegatronFinder) for finder in sys.meta_path):
        return
    if PACKAGE in sys.modules:
        raise RuntimeError(
            "megatron.core was imported before slime prepared it for the CPU: call "
            "slime.utils.accelerator.current().prepare_megatron() first"
        )
    version = importlib.metadata.version("megatron-core")
    if version != source_rules.WRITTEN_FOR:
        raise RuntimeError(
            f"megatron-core {version} is installed; its CPU adaptation (slime/backends/megatron_utils/cpu/"
            f"source_rules.py) was written for {source_rules.WRITTEN_FOR}. Install that version, or check the rules "
            "against the new one."
        )
    sys.meta_path.insert(0, MegatronFinder(cache_directory(version)))


def cache_directory(version: str) -> Path:
    """Where the rewritten modules' byte code is kept for this version and this state of the rules."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    rules = hashlib.sha256(Path(source_rules.__file__).read_bytes()).hexdigest()
    return root / "slime" / f"megatron_core-{version}-{rules[:12]}"


class RewritingLoader(importlib.machinery.SourceFileLoader):
    """Compiles the rewritten source; byte code is read from and written to `cache` instead of `__pycache__`."""

    def __init__(self, fullname: str, path: str, cache: Path) -> None:
        super().__init__(fullname, path)
        self._cache = cache

    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> CodeType:  # type: ignore[override]
        source = source_rules.rewrite(importlib.util.decode_source(data), self.name)
        return super().source_to_code(source.encode(), path, _optimize=_optimize)

    def get_data(self, path: str) -> bytes:
        return super().get_data(self._cached(path))

    def set_data(self, path: str, data: Any, *, _mode: int = 0o666) -> None:
        super().set_data(self._cached(path), data, _mode=_mode)

    def _cached(self, path: str) -> str:
        if path == self.path:
            return path
        tag = Path(path).suffixes  # [".cpython-311", ".pyc"], with ".opt-1" between under -O
        return str(self._cache / (self.name + "".join(tag)))


class MegatronFinder(importlib.abc.MetaPathFinder):
    """Gives modules of megatron-core a `RewritingLoader`; leaves every other module to the finders behind it."""

    def __init__(self, cache: Path) -> None:
        self._cache = cache

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != PACKAGE and not fullname.startswith(PACKAGE + "."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = RewritingLoader(spec.loader.name, spec.loader.path, self._cache)
        return spec
