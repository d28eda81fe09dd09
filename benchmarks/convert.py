"""Speed of weight conversion, Megatron <-> Hugging Face, against the machine's memcpy; and the memory it takes.

    python benchmarks/convert.py

One process with a bf16 Qwen3 model of random weights. `to_hf` is what a weight update does: every weight as Hugging
Face tensors, copied into a bucket that an engine could read. `from_hf` reads a safetensors folder, in the page cache,
into the model. Bandwidths are the model's bytes over the time; memcpy's is a copy of as many bytes between two buffers
in memory, measured in turn with them. The fastest of `--repeats` counts. Memory is what the process had at most over
what it had before, without files that are mapped; in buckets (`--bucket-mb`).
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def main() -> None:
    args = parse_flags()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        make_model(args, Path(folder) / "model")
        report(args, *measure(args, Path(folder) / "model"))


def parse_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--ffn", type=int, default=3072)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--bucket-mb", type=int, default=128, help="--update-weight-buffer-size, in MB")
    parser.add_argument("--threads", type=int, default=1, help="of torch, for conversion and memcpy alike")
    parser.add_argument("--repeats", type=int, default=7)
    return parser.parse_args()


def make_model(args: argparse.Namespace, folder: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=args.vocab, hidden_size=args.hidden, intermediate_size=args.ffn, num_hidden_layers=args.layers,
        num_attention_heads=16, num_key_value_heads=8, head_dim=64, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    model.save_pretrained(folder)


def measure(args: argparse.Namespace, folder: Path) -> tuple[int, dict[str, float], dict[str, float]]:
    """(bytes of the model, {what: fastest seconds}, {direction: peak extra bytes})."""
    from slime.backends.megatron_utils import initialize
    from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
    from slime.backends.megatron_utils.optimizer import build_chunks
    from slime.backends.megatron_utils.update_weight.hf_weight_iterator import HfWeightIterator
    from slime.backends.megatron_utils.update_weight.tensor_payload import fill, layout
    from slime.utils.arguments import parse_args
    from slime.utils.misc import get_free_port

    flags = parse_args(
        argv=f"""--hf-checkpoint {folder} --bf16 --debug-train-only --disable-rollout-global-dataset --num-rollout 0
        --rollout-batch-size 1 --actor-num-gpus-per-node 1 --update-weight-buffer-size {args.bucket_mb * 1_000_000}
        --log-dir {folder.parent}""".split()
    )
    initialize.init_process_group(flags, 0, 1, "127.0.0.1", get_free_port("127.0.0.1"))
    initialize.init(flags)
    model = build_chunks(flags, "actor")
    iterator = HfWeightIterator(flags, model)
    size = sum(parameter.nbytes for chunk in model for parameter in chunk.parameters())

    def to_hf(bucket: torch.Tensor) -> None:
        for chunk in iterator.chunks():
            places, length = layout(chunk)
            fill(bucket[:length], chunk, places)

    def from_hf() -> None:
        load_hf_weights(flags, model, folder)

    largest = max(layout(chunk)[1] for chunk in iterator.chunks())
    memory = {  # first, while nothing is warm
        "from_hf": peak_growth(from_hf),
        "to_hf": peak_growth(lambda: to_hf(torch.empty(largest, dtype=torch.uint8))),
    }
    bucket = torch.ones(largest, dtype=torch.uint8)
    source, target = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
    calls = {"memcpy": lambda: target.copy_(source), "to_hf": lambda: to_hf(bucket), "from_hf": from_hf}
    return size, fastest(calls, args.repeats), memory


def fastest(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Seconds of each call's fastest repeat; they take turns, so that a busy machine slows all of them."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(repeats):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - started)
    return best


def peak_growth(call: Callable[[], Any]) -> int:
    """Bytes by which the process's own memory rose at most during the call (Linux; looked at every millisecond)."""
    before = peak = own_memory()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, own_memory())

    thread = threading.Thread(target=watch)
    thread.start()
    call()
    done.set()
    thread.join()
    return peak - before


def own_memory() -> int:
    status = Path("/proc/self/status").read_text()
    return sum(int(found) * 1024 for found in re.findall(r"Rss(?:Anon|Shmem):\s+(\d+) kB", status))


def report(args: argparse.Namespace, size: int, seconds: dict[str, float], memory: dict[str, int]) -> None:
    result: dict[str, Any] = {"model_mb": size / 1e6, "threads": args.threads}
    result["memcpy_gb_per_s"] = size / seconds["memcpy"] / 1e9
    for name, peak in memory.items():
        result[name] = {
            "gb_per_s": size / seconds[name] / 1e9,
            "of_memcpy": seconds["memcpy"] / seconds[name],
            "peak_buckets": peak / args.bucket_mb / 1e6,
        }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
