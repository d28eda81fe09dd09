"""What is written is what the library reads, and the tensors stay as they were."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slime.backends.megatron_utils.safetensors_file import write_safetensors


def test_the_library_reads_it(tmp_path: Path) -> None:
    """Views of one another, tensors that are not contiguous, empty ones and scalars, in every kind of dtype."""
    base = torch.randn(6, 5)
    tensors = {
        "whole": base,
        "view": base[2:4],
        "transposed": base.T,
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "bf16": base.bfloat16(),
        "fp8": base.to(torch.float8_e4m3fn),
        "words": torch.tensor([[-1, 2**31 - 1]], dtype=torch.int32),
        "shape": torch.tensor([6, 5]),
        "flags": torch.tensor([True, False]),
    }
    size = write_safetensors(tmp_path / "file", list(tensors.items()))
    assert size == sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    read = load_file(tmp_path / "file")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype and read[name].shape == tensor.shape
        assert torch.equal(read[name].float(), tensor.float()), name


def test_written_memory_can_still_be_swapped_out(tmp_path: Path) -> None:
    """The memory saver frees a trainer's weights by resizing their storages."""
    weight = torch.nn.Parameter(torch.randn(8, 8))
    write_safetensors(tmp_path / "file", [("weight", weight)])
    assert weight.untyped_storage().resizable()


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="two tensors called a"):
        write_safetensors(tmp_path / "file", [("a", torch.ones(1)), ("a", torch.ones(1))])
