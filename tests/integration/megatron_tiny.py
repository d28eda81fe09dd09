"""A tiny Megatron model from a Hugging Face directory under any layout, and plain training steps on it."""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def make_args(hf_checkpoint: str | Path, *, tp: int = 1, pp: int = 1, vpp: int | None = None, **over: Any) -> Any:
    """The parsed flags that building, loading and saving read, for the model in `hf_checkpoint`."""
    hf = json.loads((Path(hf_checkpoint) / "config.json").read_text())
    experts = hf.get("num_experts") or hf.get("num_local_experts")  # transformers 5 writes the second
    padded = 128 * tp * -(-hf["vocab_size"] // (128 * tp))
    values = {
        "hf_checkpoint": str(hf_checkpoint),
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "ffn_hidden_size": hf["intermediate_size"],
        "num_attention_heads": hf["num_attention_heads"],
        "num_query_groups": hf["num_key_value_heads"],
        "group_query_attention": True,
        "kv_channels": hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
        "vocab_size": hf["vocab_size"],
        "padded_vocab_size": padded,
        "max_position_embeddings": hf["max_position_embeddings"],
        "norm_epsilon": hf["rms_norm_eps"],
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
        "add_qkv_bias": hf["model_type"] == "qwen2",
        "qk_layernorm": hf["model_type"].startswith("qwen3"),
        "untie_embeddings_and_output_weights": not hf["tie_word_embeddings"],
        "position_embedding_type": "rope",
        "rotary_percent": 1.0,
        "rotary_base": int(hf["rope_parameters"]["rope_theta"]),
        "use_rope_scaling": False,
        "rope_scaling_factor": 8.0,
        "rotary_seq_len_interpolation_factor": None,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "num_experts": experts,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": 1 if experts else None,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": vpp,
        "context_parallel_size": 1,
        "sequence_parallel": False,
        "params_dtype": "float32",
        "bf16": False,
        "fp16": False,
        "seed": 1234,
        "distributed_timeout_minutes": 1,
        "enable_gloo_process_groups": True,
        "custom_model_provider_path": None,
        "spec": None,
        "freeze_params_name_list": None,
        "only_train_params_name_list": None,
        "update_weight_buffer_size": 40_000,
        "load": None,
        "save": None,
        "ckpt_step": None,
        "finetune": False,
        "no_load_optim": False,
        "no_load_rng": False,
        "no_save_optim": False,
        "no_save_rng": False,
        "num_rollout": 10,
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 2,
        "global_batch_size": 4,
        "optimizer": "adam",
        "lr": 1e-2,
        "min_lr": 1e-4,
        "lr_decay_style": "cosine",
        "lr_decay_iters": None,
        "lr_warmup_iters": 0,
        "lr_warmup_fraction": 0.1,
        "lr_warmup_init": 0.0,
        "lr_wsd_decay_iters": None,
        "lr_wsd_decay_style": "exponential",
        "weight_decay": 0.1,
        "start_weight_decay": None,
        "end_weight_decay": None,
        "weight_decay_incr_style": "constant",
        "use_checkpoint_opt_param_scheduler": False,
        "override_opt_param_scheduler": False,
        "adam_beta1": 0.9,
        "adam_beta2": 0.98,
        "adam_eps": 1e-8,
        "clip_grad": 1.0,
    }
    if experts:
        values.update(
            moe_ffn_hidden_size=hf["moe_intermediate_size"],
            moe_router_topk=hf["num_experts_per_tok"],
            moe_router_load_balancing_type="none",
            moe_aux_loss_coeff=0.0,
            moe_router_dtype="fp32",
        )
    return argparse.Namespace(**{**values, **over})


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
