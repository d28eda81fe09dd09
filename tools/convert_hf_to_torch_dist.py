"""Convert a Hugging Face directory into a Megatron torch_dist checkpoint (`release`: weights without training state).

    python tools/convert_hf_to_torch_dist.py --hf-checkpoint HF --save OUT [MODEL_ARGS ...]
    torchrun --nproc-per-node 2 tools/convert_hf_to_torch_dist.py ...   # large models: one pipeline stage a process

Architecture flags are read from the config; those given must agree with it. Training may use any parallel layout.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from pathlib import Path


def main() -> None:
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    args = _parse_args(world_size)

    import torch.distributed as dist

    from slime.backends.megatron_utils import atomic_directory, initialize
    from slime.backends.megatron_utils.checkpoint import RELEASE, TRACKER_FILE, iteration_directory, write_torch_dist
    from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
    from slime.backends.megatron_utils.optimizer import setup_model_and_optimizer
    from slime.ray.ports import find_available_port
    from slime.utils.accelerator import current

    current().prepare_megatron()
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    port = int(os.environ["MASTER_PORT"]) if world_size > 1 else find_available_port(20000)
    current().set_device(int(os.environ.get("LOCAL_RANK", "0")))
    initialize.init_process_group(args, rank, world_size, address, port)
    initialize.init(args)
    model, _, _ = setup_model_and_optimizer(args)
    load_hf_weights(args, model, args.hf_checkpoint)
    directory = iteration_directory(args.save, RELEASE)
    write_torch_dist(args, directory, 0, model, None, None)
    if rank == 0:
        atomic_directory.write_text(Path(args.save) / TRACKER_FILE, RELEASE)
        print(f"{args.hf_checkpoint} -> {directory}")
    dist.barrier()
    dist.destroy_process_group()


def _parse_args(world_size: int) -> Namespace:
    if "-h" in sys.argv or "--help" in sys.argv:
        print(__doc__)
        raise SystemExit(0)
    from slime.utils.arguments import parse_args

    # what a training run must say and a conversion doesn't need
    defaults = (
        "--debug-train-only --disable-rollout-global-dataset --num-rollout 0 --rollout-batch-size 1 "
        "--no-save-optim --no-save-rng"
    )
    layout = f"--actor-num-gpus-per-node {world_size} --pipeline-model-parallel-size {world_size}"
    return parse_args(argv=[*defaults.split(), *layout.split(), *sys.argv[1:]])


if __name__ == "__main__":
    main()
