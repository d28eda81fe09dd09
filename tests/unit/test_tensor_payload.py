"""Buckets of weights for colocated engines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slime.backends.megatron_utils.update_weight.from_tensor import engine_ranks
from slime.backends.megatron_utils.update_weight.tensor_payload import fill, layout, parts

_REPOSITORY = Path(__file__).parents[2]
# Sends as a trainer would, from a process of its own: torch's shared-memory manager lives as long as the sender.
_SEND = """
import base64, json, pickletools, subprocess, sys, torch
from slime.backends.megatron_utils.update_weight import tensor_payload
from tests.unit.test_tensor_payload import tensors
strategy = torch.multiprocessing.get_sharing_strategy()
if sys.argv[1] == "by value":
    tensor_payload._SPARE_BYTES = 2**60  # as if the host's shared memory were full
memory = tensor_payload.SharedMemory()
pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
reader = subprocess.Popen([sys.executable, "-c", sys.argv[2]], **pipes)
for bucket in ([("first", torch.full((120_000,), 7.0))], [*tensors(), ("large", torch.ones(100_000))]):
    payload = tensor_payload.TensorPayload(bucket, memory)
    print(payload.text, file=reader.stdin, flush=True)
    read = [reader.stdout.readline().strip() for _ in bucket]
reader.stdin.close()
words = [arg for code, arg, _ in pickletools.genops(base64.b64decode(payload.text)) if isinstance(arg, str)]
same = strategy == torch.multiprocessing.get_sharing_strategy()
print(json.dumps({"read": read, "size": len(payload.text), "words": words, "same": same}))
"""
_RECEIVE = """
import base64, pickle, sys, torch.multiprocessing
for line in sys.stdin:
    bucket = pickle.loads(base64.b64decode(line))
    for m in bucket["metadata"]:
        t = bucket["flattened_tensor"][m.start_idx : m.end_idx].view(m.dtype).reshape(m.shape)
        print(m.name, t.dtype, tuple(t.shape), t.double().sum().item(), flush=True)
"""


def tensors() -> list[tuple[str, torch.Tensor]]:
    return [
        ("bf16", torch.arange(3, dtype=torch.bfloat16)),  # 6 bytes: what follows must be aligned all the same
        ("float", torch.arange(12, dtype=torch.float32).reshape(3, 4).t()),
        ("scalar", torch.tensor(2.5, dtype=torch.float64)),
        ("int", torch.arange(5, dtype=torch.int64)[1:]),
    ]


def test_every_tensor_comes_back_bit_for_bit() -> None:
    metadata, size = layout(tensors())
    flat = fill(torch.empty(size, dtype=torch.uint8), tensors(), metadata)
    for (name, tensor), entry in zip(tensors(), metadata, strict=True):
        back = flat[entry.start_idx : entry.end_idx].view(entry.dtype).reshape(entry.shape)
        assert (entry.name, entry.numel) == (name, tensor.numel() * tensor.element_size())
        assert back.dtype == tensor.dtype and torch.equal(back, tensor)


def test_an_empty_bucket_is_refused() -> None:
    with pytest.raises(ValueError, match="must hold a tensor"):
        layout([])


def test_a_bucket_in_host_memory_goes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tensors in order, none without a part, and only one that is too large alone is in a larger part."""
    monkeypatch.setattr("slime.backends.megatron_utils.update_weight.tensor_payload._PART_BYTES", 100)
    named = [
        (str(number), torch.empty(size, dtype=torch.uint8)) for number, size in enumerate([60, 40, 1, 300, 99, 2])
    ]
    cut = [[name for name, _ in part] for part in parts(named)]
    assert cut == [["0", "1"], ["2"], ["3"], ["4"], ["5"]]


@pytest.mark.parametrize("how", ["shared", "by value"])
def test_another_process_reads_it(how: str) -> None:
    """The second of two buckets in the same memory."""
    command = [sys.executable, "-c", _SEND, how, _RECEIVE]
    sender = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=_REPOSITORY)
    assert sender.returncode == 0, sender.stderr
    answer = json.loads(sender.stdout.splitlines()[-1])
    assert answer["read"] == [
        "bf16 torch.bfloat16 (3,) 3.0",
        "float torch.float32 (4, 3) 66.0",
        "scalar torch.float64 () 2.5",
        "int torch.int64 (4,) 10.0",
        "large torch.float32 (100000,) 100000.0",
    ]
    assert (answer["size"] < 10_000) is (how == "shared")
    assert answer["same"], "the process's own sharing strategy must stay"
    # SGLang's unpickler takes classes of its list only, none of ours
    assert not any(word.startswith(("slime", "sglang", "tests")) for word in answer["words"])


def test_trainer_ranks_of_each_engine() -> None:
    assert engine_ranks([2, 1, 1], [0, 2, 3], 4) == [(0, 1), (2,), (3,)]
    assert engine_ranks([1], [0], 4) == [(0,)]


def test_an_engine_beyond_the_trainers_devices_is_named() -> None:
    with pytest.raises(ValueError, match=r"engine 1 is on devices 2 to 3, but trainers are on 0 to 2"):
        engine_ranks([2, 2], [0, 2], 3)
