"""Tokens per second of a training step: slime's trainer against a plain transformers loop, in one process.

    python benchmarks/train_step.py                  # lengths from a log-normal distribution
    python benchmarks/train_step.py --lengths equal

Both train the same Qwen3 configuration on the same sequences in the same dtype with the same number of threads:
forward, next-token loss over the response, backward, clipping at 1.0, AdamW. The trainer packs sequences up to
`--max-tokens-per-gpu`; the loop pads each micro-batch of `--micro-batch-size` sequences to its longest. Steps
alternate, so that a busy machine slows both; the fastest of `--steps` counts. Tokens are real ones, without padding.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.dp_schedule import log_normal_lengths

STEP = Callable[[], float]


@dataclass(frozen=True)
class Trainer:
    """slime's trainer in this process, and one step of it."""

    flags: argparse.Namespace
    model: list[torch.nn.Module]
    optimizer: Any
    step: STEP


def main() -> None:
    args = parse_flags()
    torch.set_num_threads(args.threads)
    lengths = make_lengths(args)
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(0, args.vocab, (n,), generator=generator) for n in lengths]
    prompts = [n // 5 for n in lengths]
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(args, Path(folder) / "model")
        theirs = transformers_step(args, model, sequences, prompts)
        ours = slime_trainer(args, Path(folder) / "model", sequences, prompts).step
        seconds = {"slime": [], "transformers": []}
        losses = {"slime": ours(), "transformers": theirs()}  # a first step of each to warm up
        for _ in range(args.steps):
            for name, step in (("slime", ours), ("transformers", theirs)):
                started = time.perf_counter()
                step()
                seconds[name].append(time.perf_counter() - started)
    report(args, lengths, seconds, losses)


def parse_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", choices=["log-normal", "equal"], default="log-normal")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--mean", type=int, default=256)
    parser.add_argument("--cv", type=float, default=1.2, help="of the distribution; the drawn one is printed")
    parser.add_argument("--micro-batch-size", type=int, default=8, help="of the transformers loop")
    parser.add_argument("--max-tokens-per-gpu", type=int, default=2048)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocab", type=int, default=8192)
    return parser.parse_args()


def make_lengths(args: argparse.Namespace) -> list[int]:
    if args.lengths == "equal":
        return [args.mean] * args.samples
    lengths = log_normal_lengths(args.samples, args.mean, args.cv, 8 * args.mean)
    random.Random(1).shuffle(lengths)
    return lengths


def make_model(args: argparse.Namespace, directory: Path) -> Any:
    """A Qwen3 with random weights, also saved to `directory`."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=args.vocab, hidden_size=args.hidden, intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers, num_attention_heads=args.hidden // 64, num_key_value_heads=args.hidden // 128,
        head_dim=64, tie_word_embeddings=True, max_position_embeddings=16384,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    model.save_pretrained(directory)
    return model.to(getattr(torch, args.dtype)).train()


def transformers_step(args: argparse.Namespace, model: Any, sequences: list[torch.Tensor], prompts: list[int]) -> STEP:
    """The loop that anyone would write: padded micro-batches, `labels`, AdamW."""
    batches = []
    for start in range(0, len(sequences), args.micro_batch_size):
        part = sequences[start : start + args.micro_batch_size]
        ids = torch.nn.utils.rnn.pad_sequence(part, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(x) for x in part], batch_first=True)
        labels = ids.masked_fill(mask == 0, -100)
        for row, prompt in enumerate(prompts[start : start + args.micro_batch_size]):
            labels[row, :prompt] = -100
        batches.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    trained = sum(len(x) - prompt for x, prompt in zip(sequences, prompts, strict=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> float:
        optimizer.zero_grad()
        total = 0.0
        for batch in batches:
            loss = model(**batch, num_items_in_batch=trained, use_cache=False).loss
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return total

    return step


def slime_trainer(
    args: argparse.Namespace, model_dir: Path, sequences: list[torch.Tensor], prompts: list[int], *more_flags: str
) -> Trainer:
    """`train_one_step` as the training actor runs it, on a schedule of `build_dp_schedule`."""
    from slime.backends.megatron_utils import initialize
    from slime.backends.megatron_utils.data import get_data_iterator, prepare_rollout_data
    from slime.backends.megatron_utils.model import prepare_for_training, train_one_step
    from slime.backends.megatron_utils.optimizer import initialize_model_and_optimizer
    from slime.utils.arguments import parse_args
    from slime.utils.dp_schedule import build_dp_schedule
    from slime.utils.misc import get_free_port

    dtype = {"float32": "--fp32", "bfloat16": "--bf16"}[args.dtype]
    flags = parse_args(
        argv=f"""--hf-checkpoint {model_dir} {dtype} --debug-train-only --disable-rollout-global-dataset
        --num-rollout 1000 --rollout-batch-size {len(sequences)} --n-samples-per-prompt 1 --loss-type sft_loss
        --global-batch-size {len(sequences)} --use-dynamic-batch-size --max-tokens-per-gpu {args.max_tokens_per_gpu}
        --lr 1e-4 --clip-grad 1.0 --calculate-per-token-loss --actor-num-gpus-per-node 1
        --rollout-max-response-len 4096 --log-dir {model_dir.parent}""".split()
        + list(more_flags)
    )
    initialize.init_process_group(flags, 0, 1, "127.0.0.1", get_free_port("127.0.0.1"))
    initialize.init(flags)
    model, optimizer, scheduler, _ = initialize_model_and_optimizer(flags, "actor")
    data: dict[str, Any] = {
        "tokens": sequences,
        "total_lengths": [len(x) for x in sequences],
        "response_lengths": [len(x) - prompt for x, prompt in zip(sequences, prompts, strict=True)],
        "loss_masks": [
            torch.ones(len(x) - prompt, dtype=torch.int) for x, prompt in zip(sequences, prompts, strict=True)
        ],
    }
    config = {"dp_size": 1, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    count = len(sequences)
    schedule = build_dp_schedule(
        flags, config, data["total_lengths"], global_batch_size=count, rollout_indices=list(range(count))
    )
    data = {name: [column[i] for i in schedule.partitions[0]] for name, column in data.items()}
    data["micro_batch_indices"] = schedule.micro_batch_indices[0]
    data = prepare_rollout_data(data, torch.device("cpu"))
    iterators = get_data_iterator(data)
    prepare_for_training(model, optimizer)

    def step() -> float:
        for iterator in iterators:
            iterator.reset()
        metrics, _ = train_one_step(
            flags, 0, 0, iterators, model, optimizer, scheduler, schedule.num_microbatches[0], count
        )
        return metrics["loss"]

    return Trainer(flags, model, optimizer, step)


def report(
    args: argparse.Namespace, lengths: list[int], seconds: dict[str, list[float]], losses: dict[str, float]
) -> None:
    tokens = sum(lengths)
    rates = {name: tokens / min(times) for name, times in seconds.items()}
    print(
        json.dumps(
            {
                "lengths": args.lengths,
                "dtype": args.dtype,
                "threads": args.threads,
                "tokens": tokens,
                "longest": max(lengths),
                "cv": round(statistics.pstdev(lengths) / statistics.mean(lengths), 2),
                "slime_tokens_per_s": round(rates["slime"]),
                "transformers_tokens_per_s": round(rates["transformers"]),
                "ratio": round(rates["slime"] / rates["transformers"], 3),
                "first_losses": losses,
            }
        )
    )


if __name__ == "__main__":
    main()
