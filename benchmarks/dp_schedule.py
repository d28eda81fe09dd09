"""How evenly a step's work is spread: our schedule against strided and greedy assignment, on the same lengths.

    python benchmarks/dp_schedule.py --samples 1024 --dp 8 --cv 1.0

Prints one line per scheme: max/mean of forward FLOPs over data-parallel ranks and over micro-batches (1.0 is even),
the number of micro-batches per rank, and the seconds that the schedule took. Baselines: `strided` deals samples out in
turn; `greedy` gives the next sample to the rank with the least work; both then pack first-fit on each rank.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from argparse import Namespace
from collections.abc import Callable

from slime.utils.dp_schedule import build_dp_schedule
from slime.utils.flops_utils import calculate_fwd_flops
from slime.utils.seqlen_balancing import first_fit_pack

# Qwen3-0.6B
ARCHITECTURE = {
    "num_layers": 28, "hidden_size": 1024, "num_attention_heads": 16, "num_query_groups": 8, "kv_channels": 128,
    "ffn_hidden_size": 3072, "padded_vocab_size": 151936, "swiglu": True,
}  # fmt: skip

Layout = list[list[list[int]]]  # [rank][micro-batch][j], positions of samples


def log_normal_lengths(count: int, mean: float, cv: float, longest: int, seed: int = 0) -> list[int]:
    """Lengths of a log-normal distribution with this mean and coefficient of variation, before it is cut."""
    generator = random.Random(seed)
    sigma = math.sqrt(math.log(1 + cv * cv))
    draw = (generator.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma) for _ in range(count))
    return [max(16, min(longest, int(length))) for length in draw]


def ours(lengths: list[int], dp: int, cap: int, **flags: bool) -> Layout:
    args = Namespace(
        use_dynamic_batch_size=True, max_tokens_per_gpu=cap, **{"balance_by_flops": False, **flags}, **ARCHITECTURE
    )
    config = {"dp_size": dp, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    count = len(lengths)
    schedule = build_dp_schedule(args, config, lengths, global_batch_size=count, rollout_indices=list(range(count)))
    return [
        [[part[i] for i in items] for items in indices]
        for part, indices in zip(schedule.partitions, schedule.micro_batch_indices, strict=True)
    ]


def strided(lengths: list[int], dp: int, cap: int) -> Layout:
    return [pack(list(range(rank, len(lengths), dp)), lengths, cap) for rank in range(dp)]


def greedy(lengths: list[int], dp: int, cap: int) -> Layout:
    loads, samples = [0] * dp, [[] for _ in range(dp)]
    for i, length in enumerate(lengths):
        rank = loads.index(min(loads))
        samples[rank].append(i)
        loads[rank] += calculate_fwd_flops([length], Namespace(**ARCHITECTURE))
    return [pack(part, lengths, cap) for part in samples]


def pack(samples: list[int], lengths: list[int], cap: int) -> list[list[int]]:
    return [[samples[i] for i in items] for items in first_fit_pack([lengths[i] for i in samples], cap)]


def spread(values: list[int]) -> float:
    return max(values) / (sum(values) / len(values))


def report(name: str, schedule: Callable[[], Layout], lengths: list[int]) -> None:
    started = time.perf_counter()
    layout = schedule()
    seconds = time.perf_counter() - started
    work = [
        [calculate_fwd_flops([lengths[i] for i in items], Namespace(**ARCHITECTURE)) for items in rank]
        for rank in layout
    ]
    ranks, micro_batches = [sum(rank) for rank in work], [flops for rank in work for flops in rank]
    counts = [len(rank) for rank in layout]
    print(
        f"{name:24} ranks {spread(ranks):.3f}  micro-batches {spread(micro_batches):.3f}  "
        f"per rank {min(counts)}-{max(counts)}  {seconds:.2f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--dp", type=int, default=8)
    parser.add_argument("--cv", type=float, default=1.0, help="coefficient of variation of the lengths")
    parser.add_argument("--mean", type=float, default=2000)
    parser.add_argument("--longest", type=int, default=8192)
    parser.add_argument("--max-tokens-per-gpu", type=int, default=16384)
    args = parser.parse_args()
    lengths = log_normal_lengths(args.samples, args.mean, args.cv, args.longest)
    cap, dp = args.max_tokens_per_gpu, args.dp
    report("strided", lambda: strided(lengths, dp, cap), lengths)
    report("greedy", lambda: greedy(lengths, dp, cap), lengths)
    report("ours", lambda: ours(lengths, dp, cap, balance_data=False), lengths)
    balanced = {"balance_data": True}
    report("ours --balance-data", lambda: ours(lengths, dp, cap, **balanced), lengths)
    report("ours --balance-by-flops", lambda: ours(lengths, dp, cap, balance_by_flops=True, **balanced), lengths)


if __name__ == "__main__":
    main()
