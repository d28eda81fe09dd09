"""Model chunks under Megatron's data parallelism, their distributed optimizer and its schedule."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import torch

from slime.backends.megatron_utils.arguments import ddp_config_from_args, optimizer_config_from_args
from slime.backends.megatron_utils.checkpoint import load_checkpoint
from slime.backends.megatron_utils.lora.attach import check_targets
from slime.backends.megatron_utils.model_provider import check_freeze_patterns, get_model_provider_func
from slime.backends.megatron_utils.moe.router_state import keep_biases_in_float32
from slime.backends.megatron_utils.stateless_adam import drop_moments
from slime.utils.accelerator import current

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer import MegatronOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler


def initialize_model_and_optimizer(
    args: argparse.Namespace, role: str = "actor"
) -> tuple[list[DistributedDataParallel], MegatronOptimizer | None, OptimizerParamScheduler | None, int]:
    """Build and load; the last value is the iteration that was loaded (-1: none), so training starts at the next."""
    model, optimizer, scheduler = setup_model_and_optimizer(args, role)
    iteration = load_checkpoint(args, model, optimizer, scheduler)
    current().empty_cache()
    return model, optimizer, scheduler, iteration


def setup_model_and_optimizer(
    args: argparse.Namespace, role: str = "actor"
) -> tuple[list[DistributedDataParallel], MegatronOptimizer | None, OptimizerParamScheduler | None]:
    """This rank's model chunks (one, or one per virtual pipeline stage), the optimizer and the schedule.

    Without training (`--num-rollout 0`) there is neither optimizer nor schedule.
    """
    model = build_model(args, role)
    if args.num_rollout == 0:
        return model, None, None
    from megatron.core.optimizer import get_megatron_optimizer

    optimizer = get_megatron_optimizer(
        optimizer_config_from_args(args), model, use_gloo_process_groups=args.enable_gloo_process_groups
    )
    if args.use_stateless_adam:
        drop_moments(args, optimizer)
    drop_empty_parts(optimizer)
    return model, optimizer, get_optimizer_param_scheduler(args, optimizer)


def drop_empty_parts(optimizer: MegatronOptimizer) -> None:
    """Take optimizers without parameters out of a chain that has others: where only experts train, Megatron makes an
    empty one for the rest, and its checkpoints fail on it. Written for megatron-core 0.16.1."""
    parts = getattr(optimizer, "chained_optimizers", [])
    filled = [part for part in parts if not part.is_stub_optimizer]
    if filled:
        optimizer.chained_optimizers = filled


def build_model(args: argparse.Namespace, role: str) -> list[DistributedDataParallel]:
    """Model chunks on this rank's device, in the training dtype, under DistributedDataParallel."""
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.transformer.module import Float16Module

    chunks = build_chunks(args, role)
    check_freeze_patterns(chunks, args)
    if args.lora_rank is not None:
        check_targets(chunks, args)
    config = chunks[0].config
    if config.fp16 or config.bf16:
        chunks = [Float16Module(config, chunk) for chunk in chunks]
        keep_biases_in_float32(chunks)
    ddp_config = ddp_config_from_args(args)
    return [
        # later chunks' communication is off the critical path, as in Megatron-LM: one bucket each
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]


def build_chunks(args: argparse.Namespace, role: str) -> list[torch.nn.Module]:
    """Model chunks on this rank's device without any wrapper."""
    from megatron.core import parallel_state, tensor_parallel

    provider = get_model_provider_func(args, role)
    virtual_size = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    chunks = []
    for stage in range(virtual_size or 1):
        vp_stage = stage if virtual_size else None
        chunk = provider(
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            vp_stage=vp_stage,
        )
        chunk.vp_stage = vp_stage
        for parameter in chunk.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        chunks.append(chunk.to(current().device()))
    return chunks


def num_train_iters(args: argparse.Namespace) -> int:
    """Optimizer steps of the whole run."""
    return args.num_rollout * args.rollout_batch_size * args.n_samples_per_prompt // args.global_batch_size


def get_optimizer_param_scheduler(args: argparse.Namespace, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """The schedule of learning rate and weight decay; it counts in samples: step it by the step's global batch size.

    It decays over `--lr-decay-iters` (default: the whole run) and warms up over `--lr-warmup-fraction` of that, or
    over `--lr-warmup-iters`.

    Raises:
        ValueError: the warm-up is not shorter than the decay.
    """
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    batch = args.global_batch_size
    train_iters = max(num_train_iters(args), 1)
    decay_samples = (args.lr_decay_iters or train_iters) * batch
    if args.lr_warmup_fraction is not None:
        warmup_samples = args.lr_warmup_fraction * decay_samples
    else:
        warmup_samples = args.lr_warmup_iters * batch
    if warmup_samples >= decay_samples:
        raise ValueError(
            f"the warm-up ({warmup_samples:g} samples, --lr-warmup-iters / --lr-warmup-fraction) must be shorter than "
            f"the decay ({decay_samples} samples, --lr-decay-iters, by default --num-rollout's steps)"
        )
    constant_decay = args.start_weight_decay is None
    return OptimizerParamScheduler(
        optimizer,
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr or 0.0,
        lr_warmup_steps=warmup_samples,
        lr_decay_steps=decay_samples,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay if constant_decay else args.start_weight_decay,
        end_wd=args.weight_decay if constant_decay else args.end_weight_decay,
        wd_incr_steps=train_iters * batch,
        wd_incr_style=args.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=args.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=args.override_opt_param_scheduler,
        wsd_decay_steps=args.lr_wsd_decay_iters * batch if args.lr_wsd_decay_iters else None,
        lr_wsd_decay_style=args.lr_wsd_decay_style,
    )
