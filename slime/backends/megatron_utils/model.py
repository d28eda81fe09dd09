"""Running the model: forward passes that only collect results, and optimiser steps."""

from __future__ import annotations

import functools
import logging
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from slime.backends.megatron_utils.data import DataIterator, get_batch
from slime.backends.megatron_utils.loss import loss_function
from slime.backends.megatron_utils.moe.router import router_inputs
from slime.backends.megatron_utils.moe.router_state import ExpertBiases, pop_router_losses, router_loss_names
from slime.backends.megatron_utils.moe.sequence_balance import announce_sequences
from slime.backends.megatron_utils.optimizer_step import reset_moments, step_if_finite
from slime.backends.megatron_utils.update_weight.common import unwrap_model
from slime.observability.train_metric_utils import reduce_train_step_metrics, train_step_metrics
from slime.utils.accelerator import current
from slime.utils.misc import load_function

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel as DDP
    from megatron.core.optimizer import MegatronOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    from slime.backends.megatron_utils.moe.routing_replay import RoutingReplay

logger = logging.getLogger(__name__)

FORWARD_KEYS = ("tokens", "total_lengths", "response_lengths", "multimodal_train_inputs")
TRAIN_KEYS = (
    *FORWARD_KEYS, "loss_masks", "rollout_mask_sums", "log_probs", "ref_log_probs", "rollout_log_probs", "values",
    "advantages", "returns", "opd_reverse_kl", "tis_weight_means",
)  # fmt: skip


@torch.no_grad()
def forward_only(
    f: Callable[..., tuple[torch.Tensor, dict[str, list[torch.Tensor]]]],
    args: Namespace,
    model: Sequence[DDP],
    data_iterator: Sequence[DataIterator],
    num_microbatches: Sequence[int],
    store_prefix: str = "",
    replay: RoutingReplay | None = None,
) -> dict[str, list[torch.Tensor]]:
    """Run the model over all micro-batches and collect what `f` makes of the logits.

    The micro-batches are the ones of training, so the results equal what the training pass computes, bit for bit.

    Args:
        f: called as f(logits, args=..., unconcat_tokens=..., total_lengths=..., response_lengths=...,
            non_loss_data=True) on the last pipeline stage.
        num_microbatches: [step].
        store_prefix: put before the names of the results; "" means the actor's own pass.
        replay: records or replays expert choices, as its mode says.

    Returns:
        Per name, one entry per sample in the order of the rollout data; empty before the last pipeline stage.
    """

    def forward_step(iterator: DataIterator, chunk: DDP) -> tuple[torch.Tensor, Callable[..., Any]]:
        batch = get_batch(iterator, FORWARD_KEYS, args.data_pad_size_multiplier)
        collect = functools.partial(
            f,
            args=args,
            unconcat_tokens=batch["unconcat_tokens"],
            total_lengths=batch["total_lengths"],
            response_lengths=batch["response_lengths"],
        )
        with _routing(replay, chunk, iterator):
            return _run_chunk(chunk, batch), collect

    if args.custom_megatron_before_log_prob_hook_path:
        load_function(args.custom_megatron_before_log_prob_hook_path)(args, model, store_prefix)
    for iterator in data_iterator:
        iterator.reset()
    with _eval_mode(model):
        outputs = _forward_backward(forward_step, data_iterator, model, sum(num_microbatches), only_forward=True)
    return _in_sample_order(outputs, data_iterator[0], store_prefix)


def _in_sample_order(
    outputs: Sequence[tuple[torch.Tensor, dict[str, list[torch.Tensor]]]], iterator: DataIterator, prefix: str
) -> dict[str, list[torch.Tensor]]:
    if not outputs:
        return {}
    positions = [i for micro_batch in iterator.micro_batch_indices for i in micro_batch]
    results = {}
    for name in outputs[0][1]:
        values = [value for _, output in outputs for value in output[name]]
        by_position = dict(zip(positions, values, strict=True))
        results[prefix + name] = [by_position[i] for i in range(len(positions))]
    return results


def _run_chunk(chunk: DDP, batch: dict[str, Any]) -> torch.Tensor:
    """Logits [1, packed length, vocabulary / tensor-parallel size], or hidden states before the last stage.

    Position ids are left out: rotary embeddings take positions from the packed sequences' boundaries, and those of
    models that see from their images.
    """
    from slime.backends.megatron_utils.vision.model import vision_inputs

    model = unwrap_model(chunk)
    return chunk(
        input_ids=batch["tokens"],
        position_ids=None,
        attention_mask=None,
        labels=None,
        packed_seq_params=batch["packed_seq_params"],
        **router_inputs(model, batch["padding_mask"]),
        **vision_inputs(model, batch),
    )


def logits_ahead(chunk: DDP) -> list[torch.Tensor] | None:
    """Those of the multi-token-prediction layers of the pass that the chunk has just run, if it has any."""
    take = getattr(unwrap_model(chunk), "take_logits_ahead", None)
    return None if take is None else take()


def _routing(replay: RoutingReplay | None, chunk: DDP, iterator: DataIterator) -> AbstractContextManager[None]:
    """The chunk's pass over the micro-batch that the iterator gave last."""
    return nullcontext() if replay is None else replay.forward(chunk, iterator.offset - 1)


def _forward_backward(
    forward_step: Callable[..., Any],
    data_iterator: Sequence[DataIterator],
    model: Sequence[DDP],
    num_microbatches: int,
    only_forward: bool,
) -> list[Any]:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=list(data_iterator),
        model=list(model),
        num_microbatches=num_microbatches,
        seq_length=1,  # of no consequence: stages tell each other the shapes of packed micro-batches
        micro_batch_size=1,
        forward_only=only_forward,
        collect_non_loss_data=only_forward,
    )


@contextmanager
def _eval_mode(model: Sequence[DDP]) -> Iterator[None]:
    overlapped = should_disable_forward_pre_hook(model)
    if overlapped:
        disable_forward_pre_hook(model)
    for chunk in model:
        chunk.eval()
    yield
    for chunk in model:
        chunk.train()
    if overlapped:
        enable_forward_pre_hook(model)


def should_disable_forward_pre_hook(model: Sequence[DDP]) -> bool:
    """Whether forward hooks wait for parameters that the optimiser is still gathering."""
    config = model[0].ddp_config
    return bool(config.use_distributed_optimizer and config.overlap_param_gather)


def enable_forward_pre_hook(model_chunks: Sequence[DDP]) -> None:
    """Let each module's forward wait for its parameters again."""
    for chunk in model_chunks:
        chunk.enable_forward_pre_hook()


def disable_forward_pre_hook(model_chunks: Sequence[DDP], param_sync: bool = True) -> None:
    """Finish gathering parameters now (unless told not to) and don't wait in forward passes."""
    for chunk in model_chunks:
        chunk.disable_forward_pre_hook(param_sync=param_sync)


def train_one_step(
    args: Namespace,
    rollout_id: int,
    step_id: int,
    data_iterator: Sequence[DataIterator],
    model: Sequence[DDP],
    optimizer: MegatronOptimizer,
    opt_param_scheduler: OptimizerParamScheduler,
    num_microbatches: int,
    step_global_batch_size: int,
    replay: RoutingReplay | None = None,
) -> tuple[dict[str, float], float | None]:
    """One optimiser step over the iterators' next `num_microbatches` micro-batches.

    A step whose gradient is not finite changes neither weights nor expert biases nor optimiser nor schedule.

    Returns:
        (the step's metrics, reduced over all ranks; those of the loss on the last pipeline stage only,
         the gradient norm before clipping; None for a step that was skipped)
    """
    from megatron.core import parallel_state as mpu

    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    if args.custom_megatron_before_train_step_hook_path:
        load_function(args.custom_megatron_before_train_step_hook_path)(
            args, rollout_id, step_id, model, optimizer, opt_param_scheduler
        )

    def forward_step(iterator: DataIterator, chunk: DDP) -> tuple[torch.Tensor, Callable[..., Any]]:
        batch = get_batch(iterator, TRAIN_KEYS, args.data_pad_size_multiplier)
        if "seq_load_balancing_loss" in router_losses:
            # Megatron takes the mean over micro-batches and replicas: this makes it one over the step's rollouts
            announce_sequences(unwrap_model(chunk), batch, num_microbatches * replicas / step_global_batch_size)
        with _routing(replay, chunk, iterator):
            output = _run_chunk(chunk, batch)
        batch["logits_ahead"] = logits_ahead(chunk)
        return output, functools.partial(loss_function, args, batch, num_microbatches, step_global_batch_size)

    biases = ExpertBiases(model)
    replicas, router_losses = mpu.get_data_parallel_world_size(), router_loss_names(args)
    with nullcontext() if replay is None else replay.replay():
        losses = _forward_backward(forward_step, data_iterator, model, num_microbatches, only_forward=False)
    updated, grad_norm = step_if_finite(optimizer)
    if updated:
        opt_param_scheduler.step(increment=step_global_batch_size)
    else:
        biases.restore()
        logger.warning("rollout %d, step %d: the gradient is not finite, the step is skipped", rollout_id, step_id)
    metrics = _reduce_metrics(args, losses, step_global_batch_size) if losses else {}
    metrics |= pop_router_losses(args, num_microbatches)
    if replay is not None:
        metrics |= replay.pop_metrics(current().device())
    return metrics, grad_norm


def _reduce_metrics(args: Namespace, losses: list[dict[str, Any]], step_global_batch_size: int) -> dict[str, float]:
    from megatron.core import parallel_state as mpu

    return reduce_train_step_metrics(
        losses,
        calculate_per_token_loss=args.calculate_per_token_loss,
        step_global_batch_size=step_global_batch_size,
        cp_size=mpu.get_context_parallel_world_size(),
        dp_with_cp_group=mpu.get_data_parallel_group(with_context_parallel=True),
    )


def train(
    args: Namespace,
    rollout_id: int,
    model: Sequence[DDP],
    optimizer: MegatronOptimizer,
    opt_param_scheduler: OptimizerParamScheduler,
    data_iterator: Sequence[DataIterator],
    num_microbatches: Sequence[int],
    global_batch_sizes: Sequence[int],
    role: str = "actor",
    replay: RoutingReplay | None = None,
) -> list[dict[str, float]]:
    """All optimiser steps of a rollout, one after another.

    Args:
        num_microbatches, global_batch_sizes: [step].
        replay: holds the expert choices that the passes use.

    Returns:
        The metrics of each step (surface 6.9), complete on the last pipeline stage. `train/skipped_steps` counts the
        steps of this rollout, so far, that were skipped.
    """
    prepare_for_training(model, optimizer)
    if args.reset_optimizer_states:
        reset_moments(optimizer)
    for iterator in data_iterator:
        iterator.reset()
    history = []
    skipped = 0
    for step_id, (count, batch_size) in enumerate(zip(num_microbatches, global_batch_sizes, strict=True)):
        rates = [group["lr"] for group in optimizer.param_groups]
        reduced, grad_norm = train_one_step(
            args, rollout_id, step_id, data_iterator, model, optimizer, opt_param_scheduler, count, batch_size, replay
        )
        skipped += grad_norm is None
        metrics = train_step_metrics(
            args,
            reduced,
            rollout_id=rollout_id,
            step_id=step_id,
            steps_per_rollout=len(num_microbatches),
            global_batch_size=batch_size,
            grad_norm=grad_norm,
            learning_rates=rates,
            role=role,
        )
        metrics[f"train/{'' if role == 'actor' else f'{role}-'}skipped_steps"] = skipped
        history.append(metrics)
    _finish_param_gather(model)
    return history


def _finish_param_gather(model: Sequence[DDP]) -> None:
    """Gather the last step's parameters now: what reads the weights next may be no forward pass."""
    if should_disable_forward_pre_hook(model):
        disable_forward_pre_hook(model)
        enable_forward_pre_hook(model)


def prepare_for_training(model: Sequence[DDP], optimizer: MegatronOptimizer) -> None:
    """Train mode, and the callbacks through which Megatron's schedules reach the optimiser and the DDP wrappers."""
    from megatron.core.distributed import finalize_model_grads

    for chunk in model:
        chunk.train()
    config, ddp_config = model[0].config, model[0].ddp_config
    config.timers = None
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if ddp_config.overlap_grad_reduce:
        config.no_sync_func = _one_or_all([chunk.no_sync for chunk in model])
        if ddp_config.align_param_gather:
            config.grad_sync_func = _one_or_all([chunk.start_grad_sync for chunk in model])
    if ddp_config.overlap_param_gather and ddp_config.align_param_gather:
        config.param_sync_func = _one_or_all([chunk.start_param_sync for chunk in model])


def _one_or_all(functions: list[Callable[..., Any]]) -> Any:
    """Megatron wants a function for one chunk, a list for several."""
    return functions[0] if len(functions) == 1 else functions
