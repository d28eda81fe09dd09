"""Peak memory and time of the log-prob pass over a large vocabulary, as a multiple of the float32 chunk in use.

    python benchmarks/log_probs.py --vocab 151936 --tokens 4096 --chunk 1024

Prints one JSON line per case. Memory is the process's high-water mark over what it held before; the gradient, which
has the logits' shape, is not counted. `naive` is log_softmax over all tokens, for comparison.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from slime.utils.ppo_utils import calculate_log_probs_and_entropy


def peak_growth(call: Callable[[], Any]) -> tuple[int, float, Any]:
    """(bytes by which the resident memory rose at most during the call, seconds, result). Linux only."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = _status("VmRSS")
    started = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - started
    return _status("VmHWM") - before, seconds, result


def _status(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found, f"/proc/self/status has no {field}"
    return int(found[1]) * 1024


def measure(vocab: int, tokens: int, chunk: int, dtype: str, entropy: bool) -> dict[str, float]:
    """Forward and backward of one pass; memory in float32 chunks of `chunk` x `vocab`."""
    logits = torch.randn(tokens, vocab, dtype=torch.float32).to(getattr(torch, dtype)).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,))
    warm = logits.detach()[:2].clone().requires_grad_()
    sum(calculate_log_probs_and_entropy(warm, targets[:2], None, True, chunk)).sum().backward()  # type: ignore[arg-type]

    forward_bytes, forward_s, (log_probs, spread) = peak_growth(
        lambda: calculate_log_probs_and_entropy(logits, targets, None, entropy, chunk)
    )
    loss = log_probs.sum() + (0.01 * spread.sum() if spread is not None else 0.0)
    backward_bytes, backward_s, _ = peak_growth(loss.backward)
    chunk_bytes = 4 * vocab * chunk
    return {
        "forward_chunks": forward_bytes / chunk_bytes,
        "backward_chunks": (backward_bytes - logits.nbytes) / chunk_bytes,
        "forward_s": forward_s,
        "backward_s": backward_s,
    }


def naive(vocab: int, tokens: int, chunk: int, dtype: str) -> dict[str, float]:
    """The same log-probs by log_softmax in float32."""
    logits = torch.randn(tokens, vocab, dtype=torch.float32).to(getattr(torch, dtype)).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,))
    forward_bytes, forward_s, log_probs = peak_growth(
        lambda: logits.float().log_softmax(-1).gather(1, targets[:, None])
    )
    backward_bytes, backward_s, _ = peak_growth(log_probs.sum().backward)
    chunk_bytes = 4 * vocab * chunk
    return {
        "forward_chunks": forward_bytes / chunk_bytes,
        "backward_chunks": (backward_bytes - logits.nbytes) / chunk_bytes,
        "forward_s": forward_s,
        "backward_s": backward_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--chunk", type=int, default=1024)
    args = parser.parse_args()
    size = (args.vocab, args.tokens, args.chunk)
    for dtype in ("float32", "bfloat16"):
        for entropy in (False, True):
            print(json.dumps({"dtype": dtype, "entropy": entropy, **measure(*size, dtype, entropy)}), flush=True)
        print(json.dumps({"dtype": dtype, "naive": True, **naive(*size, dtype)}), flush=True)


if __name__ == "__main__":
    main()
