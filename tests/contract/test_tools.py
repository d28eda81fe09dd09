"""tools/convert_*.py: their command lines."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

TOOLS = sorted((Path(__file__).resolve().parents[2] / "tools").glob("convert_*.py"))


@pytest.mark.parametrize("path", TOOLS, ids=lambda path: path.name)
def test_help(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """C11: every conversion explains itself, and every one has a dry run."""
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(path), run_name="__main__")
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert f"python tools/{path.name}" in text and "--dry-run" in text


def test_there_are_all() -> None:
    names = {path.name for path in TOOLS}
    assert {"convert_hf_to_torch_dist.py", "convert_torch_dist_to_hf.py", "convert_hf_to_fp8.py"} <= names
    assert {"convert_hf_to_int4.py", "convert_hf_to_bf16.py", "convert_gguf_to_hf.py"} <= names
