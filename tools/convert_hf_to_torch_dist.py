"""Convert a Hugging Face directory into a Megatron torch_dist checkpoint (`release`: weights without training state).

    python tools/convert_hf_to_torch_dist.py --hf-checkpoint HF --save OUT [--dry-run] [MODEL_ARGS ...]
    torchrun --nproc-per-node 2 tools/convert_hf_to_torch_dist.py ...   # large models: one pipeline stage a process

Architecture flags are read from the config; those given must agree with it. Training may use any parallel layout. A
process holds the weights of its stage and the one that it reads, nothing else. Sources in low precision become full.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from typing import Any


def main() -> None:
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    dry_run = "--dry-run" in sys.argv
    args = _parse_args(world_size)

    import torch.distributed as dist
    from tqdm import tqdm

    from slime.backends.megatron_utils.checkpoint import RELEASE, iteration_directory, write_torch_dist
    from slime.backends.megatron_utils.checkpoint_directory import write_tracker
    from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights

    directory = iteration_directory(args.save, RELEASE)
    if rank == 0:
        print(f"{args.hf_checkpoint} -> {directory}: {_describe(args)}")
    if dry_run:
        return
    model = _build_model(args, rank, world_size)
    size = sum(parameter.nbytes for chunk in model for parameter in chunk.parameters())
    with tqdm(total=size, unit="B", unit_scale=True, desc="reading", disable=rank != 0) as progress:
        load_hf_weights(args, model, args.hf_checkpoint, on_weight=lambda weight: progress.update(weight.nbytes))
    write_torch_dist(args, directory, 0, model, None, None)
    if rank == 0:
        write_tracker(args.save, RELEASE)
        print(f"written: {directory}")
    dist.barrier()
    dist.destroy_process_group()


def _describe(args: Namespace) -> str:
    from slime.backends.megatron_utils.hf_to_megatron.dequantizing_reader import open_weights

    reader = open_weights(args.hf_checkpoint)
    size = sum(reader.describe(name)[1] for name in reader.names)
    stages = args.pipeline_model_parallel_size
    return f"{args.num_layers} layers, {len(reader.names)} weights, {size / (1 << 30):.2f} GiB, {stages} process(es)"


def _build_model(args: Namespace, rank: int, world_size: int) -> list[Any]:
    """The chunks of this process's stage, without what training adds (gradients take twice the weights' memory)."""
    from slime.backends.megatron_utils import initialize
    from slime.backends.megatron_utils.optimizer import build_chunks
    from slime.ray.ports import find_available_port
    from slime.utils.accelerator import current

    current().prepare_megatron()
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    port = int(os.environ["MASTER_PORT"]) if world_size > 1 else find_available_port(20000)
    current().set_device(int(os.environ.get("LOCAL_RANK", "0")))
    initialize.init_process_group(args, rank, world_size, address, port)
    initialize.init(args)
    return build_chunks(args, "actor")


def _parse_args(world_size: int) -> Namespace:
    if "-h" in sys.argv or "--help" in sys.argv:
        print(__doc__)
        raise SystemExit(0)
    from slime.utils.arguments import parse_args

    # what a training run must say and a conversion doesn't need
    defaults = (
        "--debug-train-only --disable-rollout-global-dataset --num-rollout 0 --rollout-batch-size 1 "
        "--no-save-optim --no-save-rng --no-initialization"
    )
    words = [word for word in sys.argv[1:] if word != "--dry-run"]
    layout = f"--actor-num-gpus-per-node {world_size} --pipeline-model-parallel-size {world_size}"
    return parse_args(argv=[*defaults.split(), *layout.split(), *words])


if __name__ == "__main__":
    main()
