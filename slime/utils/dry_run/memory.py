"""Bytes per device that a run's tensors of known size take: an estimate before anything is started.

Activations, collective buffers, CUDA graphs and allocator slack are not in it.
"""

from __future__ import annotations

import os
from argparse import Namespace
from dataclasses import dataclass

from slime.utils.dry_run.adapters import count_rank_adapters
from slime.utils.dry_run.batches import tokens_per_micro_batch
from slime.utils.dry_run.engine_memory import EngineMemory, plan_engine_memory
from slime.utils.dry_run.parameters import ParameterCount, count_rank_parameters
from slime.utils.dry_run.vision import count_tower_parameters

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


@dataclass(frozen=True)
class TrainerMemory:
    """Bytes of the training rank that holds most.

    Attributes:
        stage: its pipeline stage.
        parameters: how many parameters it holds.
        trained: how many of them have gradients; with LoRA those of the adapters.
        log_prob_buffers: logits of one micro-batch, their float32 copy and their gradient; None without a token limit.
        host_copies: copies of the weights in host memory (the actor's, the reference's, ...), per rank.
    """

    stage: int
    parameters: int
    trained: int
    weights: int
    gradients: int
    optimizer_state: int
    log_prob_buffers: int | None
    host_copies: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer_state + (self.log_prob_buffers or 0)


@dataclass(frozen=True)
class Memory:
    """What trainer, critic and engine take; colocated and offloaded, they take turns."""

    trainer: TrainerMemory | None
    critic: TrainerMemory | None
    engine: EngineMemory | None
    take_turns: bool


def plan_memory(args: Namespace) -> Memory:
    """The largest training rank and one engine device."""
    trainer = critic = None
    if not args.debug_rollout_only:
        trainer = _largest_rank(args, "actor")
        critic = _largest_rank(args, "critic") if args.use_critic else None
    return Memory(trainer, critic, plan_engine_memory(args), args.offload_train and args.offload_rollout)


def _largest_rank(args: Namespace, role: str) -> TrainerMemory:
    stages = range(args.pipeline_model_parallel_size)
    return max((stage_memory(args, stage, role) for stage in stages), key=lambda plan: plan.total)


def stage_memory(args: Namespace, stage: int, role: str = "actor") -> TrainerMemory:
    """What a rank of one pipeline stage takes."""
    whole = count_rank_parameters(args, stage, role)
    adapters = count_rank_adapters(args, stage) if role == "actor" else ParameterCount(0, 0)
    frozen = count_tower_parameters(args) if stage == 0 and args.vision_tower == "frozen" else 0
    trained = adapters if args.lora_rank is not None and role == "actor" else whole + ParameterCount(-frozen, 0)
    count = whole + adapters
    size = BYTES[args.params_dtype]
    trains = args.num_rollout != 0
    has_logits = role == "actor" and stage == args.pipeline_model_parallel_size - 1
    return TrainerMemory(
        stage=stage,
        parameters=count.total,
        trained=trained.total,
        weights=count.total * size,
        gradients=trained.total * _gradient_size(args) if trains else 0,
        optimizer_state=_optimizer_state(args, trained) if trains else 0,
        log_prob_buffers=_log_prob_buffers(args) if has_logits else 0,
        host_copies=_host_copies(args, whole.total, adapters.total) * size if role == "actor" else 0,
    )


def _host_copies(args: Namespace, weights: int, adapters: int) -> int:
    """Parameters in copies of the actor; of the reference, a teacher and two older actors where there are such.

    With LoRA these are adapters; the base is copied where the trainer sleeps or where a reference or teacher is
    another model, which is copied too.
    """
    reference = args.kl_coef != 0 or args.use_kl_loss
    teacher = args.use_opd and args.opd_type == "megatron"
    copies = 1 + reference + teacher + 2 * args.keep_old_actor
    if args.lora_rank is None:
        return copies * weights
    others = (reference and _other_model(args, args.ref_load)) + (
        teacher and _other_model(args, args.opd_teacher_load)
    )
    return copies * adapters + (others + (args.offload_train or others > 0)) * weights


def _other_model(args: Namespace, path: str) -> bool:
    return os.path.realpath(path) != os.path.realpath(args.hf_checkpoint)


def _gradient_size(args: Namespace) -> int:
    if args.accumulate_allreduce_grads_in_fp32 or args.use_precision_aware_optimizer:
        return BYTES[args.main_grads_dtype] if args.use_precision_aware_optimizer else 4
    return BYTES[args.params_dtype]


def _optimizer_state(args: Namespace, count: ParameterCount) -> int:
    """Float32 weights (where training is in less) and Adam's two moments, shared out over the replicas.

    A rank's dense parameters have data x context parallel replicas; its experts' the ranks that are left when expert
    tensor, expert and pipeline parallel ranks are set aside.
    """
    if args.optimizer_cpu_offload and args.optimizer_offload_fraction == 1.0:
        return 0
    per_parameter = _bytes_per_parameter(args)
    dense_replicas = args.data_parallel_size * args.context_parallel_size
    expert_ranks = args.expert_tensor_parallel_size * args.expert_model_parallel_size
    expert_replicas = args.world_size // (expert_ranks * args.pipeline_model_parallel_size)
    total = count.dense * per_parameter // dense_replicas + count.expert * per_parameter // max(expert_replicas, 1)
    offloaded = args.optimizer_offload_fraction if args.optimizer_cpu_offload else 0.0
    return int(total * (1 - offloaded))


def _bytes_per_parameter(args: Namespace) -> int:
    copy = 0 if args.params_dtype == "float32" else 4
    if args.optimizer != "adam":
        return copy + 4  # momentum
    if args.use_stateless_adam:
        return copy
    if args.use_precision_aware_optimizer:
        copy = BYTES[args.main_params_dtype]
        return copy + BYTES[args.exp_avg_dtype] + BYTES[args.exp_avg_sq_dtype]
    return copy + 8


def _log_prob_buffers(args: Namespace) -> int | None:
    """The logits that the model gives in float32, one float32 work copy (of a chunk), and the logits' gradient."""
    tokens = tokens_per_micro_batch(args)
    if tokens is None:
        return None
    row = args.padded_vocab_size // args.tensor_model_parallel_size * 4
    chunk = min(tokens, args.log_probs_chunk_size) if args.log_probs_chunk_size > 0 else tokens
    model_output = 0 if args.params_dtype == "float32" else tokens * row // 2
    return model_output + tokens * row + chunk * row + tokens * row
