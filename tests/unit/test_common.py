"""`is_npu` answers without importing torch_npu where it is absent; torch_npu itself is a stand-in file here."""

from __future__ import annotations

import sys

import pytest
import torch

from slime.utils.common import is_npu


@pytest.fixture
def torch_npu(tmp_path, monkeypatch):
    def install(source: str) -> None:
        (tmp_path / "torch_npu.py").write_text(source)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setattr(torch, "npu", None, raising=False)

    yield install
    sys.modules.pop("torch_npu", None)


def test_without_torch_npu_the_answer_is_no_and_nothing_is_imported():
    assert is_npu() is False
    assert "torch_npu" not in sys.modules


@pytest.mark.parametrize("available", [True, False])
def test_with_torch_npu_the_device_decides(torch_npu, available):
    torch_npu(f"import torch, types\ntorch.npu = types.SimpleNamespace(is_available=lambda: {available})\n")
    assert is_npu() is available


def test_a_torch_npu_without_driver_is_no_npu(torch_npu):
    torch_npu("raise ImportError('libascend_hal.so: cannot open shared object file')\n")
    assert is_npu() is False
