"""A tiny Megatron model from a Hugging Face directory under any layout, and plain training steps on it."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# 10 rollouts of 8 samples in 2 steps each; 10 % of the cosine schedule is warm-up
RUN_FLAGS = """
    --debug-train-only --disable-rollout-global-dataset
    --num-rollout 10 --rollout-batch-size 4 --n-samples-per-prompt 2 --global-batch-size 4
    --lr 1e-2 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-fraction 0.1 --weight-decay 0.1 --adam-beta2 0.98
    --make-vocab-size-divisible-by 128 --update-weight-buffer-size 40000 --distributed-timeout-minutes 1
"""
MOE_FLAGS = """
    --num-experts 6 --moe-ffn-hidden-size 36 --moe-router-topk 2 --moe-router-load-balancing-type none
    --moe-aux-loss-coeff 0 --moe-router-dtype fp32 --expert-tensor-parallel-size 1
"""


def make_args(hf_checkpoint: str | Path, *, flags: str = "", **attributes: Any) -> argparse.Namespace:
    """The parsed flags of a run on the model in `hf_checkpoint`; `attributes` are set afterwards, as they are."""
    from slime.utils.arguments import parse_args

    moe = MOE_FLAGS if Path(hf_checkpoint).name == "qwen3_moe" else ""
    devices = f"--actor-num-gpus-per-node {dist.get_world_size()}"
    args = parse_args(argv=f"--hf-checkpoint {hf_checkpoint} {devices} {RUN_FLAGS} {moe} {flags}".split())
    args.load, args.finetune, args.no_load_optim, args.no_load_rng = None, False, False, False
    vars(args).update(attributes)
    return args


def init_layout(args: Any) -> None:
    """Model-parallel groups and seeds for these flags, in place of those before."""
    from megatron.core import parallel_state

    from slime.backends.megatron_utils import initialize

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    initialize.init(args)


@torch.no_grad()
def forward_logits(model: Sequence[torch.nn.Module], tokens: Tensor) -> Tensor | None:
    """Full-vocabulary logits [batch, sequence, padded vocabulary] on the last pipeline stage, None elsewhere."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    rows = list(tokens.split(1))  # interleaved stages need as many micro-batches as stages
    outputs = _forward_backward(model, rows, lambda logits, _: (logits.sum(), {"logits": logits}), True)
    if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        return None
    return gather_from_tensor_model_parallel_region(torch.cat([output["logits"] for output in outputs]))


@torch.no_grad()
def packed_logits(model: Sequence[torch.nn.Module], tokens: Tensor) -> Tensor:
    """The same for one stage, from the rows of `tokens` packed into one sequence, as training has them."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    rows, length = tokens.shape
    bounds = torch.arange(0, (rows + 1) * length, length, dtype=torch.int32)
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=length, max_seqlen_kv=length
    )
    logits = model[0](
        input_ids=tokens.reshape(1, -1), position_ids=None, attention_mask=None, packed_seq_params=packed
    )
    return gather_from_tensor_model_parallel_region(logits).reshape(rows, length, -1)


def train_step(args: Any, model: Sequence[torch.nn.Module], optimizer: Any, scheduler: Any, step: int) -> list[float]:
    """One optimizer step on random next-token batches that depend on `step`: [loss, gradient norm, learning rate]."""
    from megatron.core import parallel_state

    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    replicas = parallel_state.get_data_parallel_world_size()
    generator = torch.Generator().manual_seed(step)
    batches = [torch.randint(0, args.vocab_size, (2, 17), generator=generator) for _ in range(2 * replicas)]
    mine = batches[parallel_state.get_data_parallel_rank() :: replicas]
    outputs = _forward_backward(model, mine, _next_token_loss, False)
    loss = torch.tensor([sum(output["loss"].item() for output in outputs) if outputs else 0.0], dtype=torch.float64)
    dist.all_reduce(loss)
    duplicates = parallel_state.get_tensor_model_parallel_world_size()
    _, norm, _ = optimizer.step()
    rate = optimizer.param_groups[0]["lr"]
    scheduler.step(increment=args.global_batch_size)
    return [loss.item() / len(batches) / duplicates, float(norm), rate]


def _next_token_loss(logits: Tensor, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    targets = tokens[:, 1:].transpose(0, 1).contiguous()
    loss = vocab_parallel_cross_entropy(logits[:, :-1].transpose(0, 1).contiguous().float(), targets).mean()
    return loss, {"loss": loss.detach()}


def _forward_backward(model: Sequence[torch.nn.Module], batches: list[Tensor], loss: Any, forward_only: bool) -> Any:
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def step(batches: Iterator[Tensor], chunk: torch.nn.Module) -> tuple[Tensor, Any]:
        tokens = next(batches)
        logits = chunk(input_ids=tokens, position_ids=None, attention_mask=None)
        return logits, functools.partial(loss, tokens=tokens) if loss is _next_token_loss else lambda x: loss(
            x, tokens
        )

    model[0].config.finalize_model_grads_func = finalize_model_grads
    iterators = [iter(batches) for _ in model]
    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iterators if len(model) > 1 else iterators[0],
        model=list(model) if len(model) > 1 else model[0],
        num_microbatches=len(batches),
        seq_length=batches[0].shape[1],
        micro_batch_size=batches[0].shape[0],
        forward_only=forward_only,
    )
