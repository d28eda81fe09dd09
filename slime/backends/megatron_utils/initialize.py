"""From a started process to a Megatron rank: process groups, model-parallel groups, seeds, determinism."""

from __future__ import annotations

import logging
import random
from argparse import Namespace
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from slime.utils import accelerator
from slime.utils.distributed_utils import init_gloo_group, tcp_init_method
from slime.utils.misc import load_function

logger = logging.getLogger(__name__)


def init_process_group(args: Namespace, rank: int, world_size: int, master_addr: str, master_port: int) -> None:
    """Join the trainers' process group, with a deadline on joining and on every collective, and make the gloo group.

    With `args.offload_train` the groups made from here on can be destroyed and rebuilt (`reloadable_process_group`).
    Sets `args.rank` and `args.world_size`.

    Raises:
        torch.distributed.DistError: not every rank joined within `--distributed-timeout-minutes`.
    """
    if getattr(args, "offload_train", False):
        from slime.utils.reloadable_process_group import monkey_patch_torch_dist

        monkey_patch_torch_dist()
    args.rank, args.world_size = rank, world_size
    dist.init_process_group(
        backend=accelerator.current().collective_backend,
        init_method=tcp_init_method(master_addr, master_port),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(minutes=args.distributed_timeout_minutes),
    )
    init_gloo_group()


def init(args: Namespace) -> None:
    """Make Megatron's model-parallel groups, seed every generator, and run `--custom-megatron-init-path`.

    Call after `init_process_group` and before a model is built.
    """
    device = accelerator.current()
    device.prepare_megatron()
    if getattr(args, "deterministic_mode", False):
        make_deterministic()
    init_model_parallel(args)
    set_random_seed(args)
    device.after_megatron_init(args)
    if getattr(args, "custom_megatron_init_path", None):
        load_function(args.custom_megatron_init_path)(args)
    if dist.get_rank() == 0:
        logger.info("model parallel: %s", describe_model_parallel())


def init_model_parallel(args: Namespace) -> None:
    """Tensor, pipeline (and virtual), context, expert and expert-tensor parallel groups from the flags' sizes.

    Raises:
        RuntimeError: the world size is not divisible by their product (Megatron's message).
    """
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=getattr(args, "virtual_pipeline_model_parallel_size", None),
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=getattr(args, "expert_tensor_parallel_size", None),
        distributed_timeout_minutes=args.distributed_timeout_minutes,
        order="tp-cp-ep-pp-dp" if getattr(args, "use_tp_pp_dp_mapping", False) else "tp-cp-ep-dp-pp",
        create_gloo_process_groups=getattr(args, "enable_gloo_process_groups", True),
    )


def set_random_seed(args: Namespace) -> None:
    """Seed Python, numpy, torch and Megatron's model-parallel generators as Megatron-LM does.

    Ranks of one model replica draw differently per pipeline stage (seed + 100 · stage), the same per data-parallel
    rank unless `--data-parallel-random-init` (+ 10 · rank).

    Raises:
        ValueError: a seed that is not positive.
    """
    from megatron.core import parallel_state, tensor_parallel

    if args.seed is None or args.seed <= 0:
        raise ValueError(f"--seed must be a positive integer, got {args.seed}")
    seed = args.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    if getattr(args, "data_parallel_random_init", False):
        seed += 10 * parallel_state.get_data_parallel_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(
        seed, te_rng_tracker=getattr(args, "te_rng_tracker", False), force_reset_rng=True
    )


def make_deterministic() -> None:
    """Only deterministic kernels; an operation that has none raises."""
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    torch.utils.deterministic.fill_uninitialized_memory = False


def is_megatron_main_rank() -> bool:
    """Whether this rank reports: data-parallel and tensor-parallel rank 0 of the last pipeline stage."""
    from megatron.core import parallel_state

    return (
        parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
        and parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    )


def describe_model_parallel() -> str:
    """Sizes of the parallel dimensions, for a log line."""
    from megatron.core import parallel_state

    sizes = {
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "vpp": parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        "cp": parallel_state.get_context_parallel_world_size(),
        "dp": parallel_state.get_data_parallel_world_size(),
        "ep": parallel_state.get_expert_model_parallel_world_size(),
        "etp": parallel_state.get_expert_tensor_parallel_world_size(),
    }
    return " ".join(f"{name}={size}" for name, size in sizes.items())
