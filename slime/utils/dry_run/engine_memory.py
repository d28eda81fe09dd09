"""Bytes per device of an SGLang engine's weights and KV cache."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from typing import Any

_KV_BYTES = {"auto": None, "fp8_e5m2": 1, "fp8_e4m3": 1, "bf16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of one device of an engine.

    Attributes:
        kv_bytes_per_token: over all of the device's layers and heads.
        kv_tokens: size of the cache in tokens where a setting decides it; None where the engine measures the device
            and takes what `static_fraction` leaves beside the weights.
        kv_cache: bytes of the cache, where `kv_tokens` is known.
    """

    weights: int
    kv_bytes_per_token: int
    kv_tokens: int | None
    kv_cache: int | None
    static_fraction: float | None


def plan_engine_memory(args: Namespace) -> EngineMemory | None:
    """One device of the (smallest) engine of the trained model; None where the run has no engines of its own."""
    from slime.utils.accelerator import current

    if args.debug_train_only or args.rollout_external or not args.rollout_num_gpus:
        return None
    facts = _engine_facts(args)
    if facts is None:
        return None
    device = current().engine_server_args()
    size = 4 if device.get("dtype") is not None and args.params_dtype == "float32" else 2
    pipeline = getattr(args, "sglang_pp_size", 1) or 1
    ranks = _smallest_engine(args)
    tensor = max(1, ranks // pipeline)
    tensor //= getattr(args, "sglang_dp_size", 1) or 1  # data-parallel attention keeps whole heads
    heads = -(-facts.num_query_groups // max(tensor, 1))
    kv_size = _KV_BYTES.get(getattr(args, "sglang_kv_cache_dtype", None) or "auto") or size
    layers = -(-facts.num_layers // pipeline)
    per_token = _values_per_token(facts, heads) * layers * kv_size
    tokens = getattr(args, "sglang_max_total_tokens", None) or device.get("max_total_tokens")
    return EngineMemory(
        weights=_model_parameters(facts) * size // ranks,
        kv_bytes_per_token=per_token,
        kv_tokens=tokens,
        kv_cache=None if tokens is None else tokens * per_token,
        static_fraction=getattr(args, "sglang_mem_fraction_static", None),
    )


def _smallest_engine(args: Namespace) -> int:
    """Devices of the engine of the trained model whose devices hold most."""
    from slime.backends.sglang_utils.sglang_config import SglangConfig

    groups = SglangConfig.from_args(args).main_model.server_groups
    return min(group.num_gpus_per_engine for group in groups if group.num_engines)


def _values_per_token(facts: Namespace, heads: int) -> int:
    if facts.multi_latent_attention:
        return facts.kv_lora_rank + facts.qk_pos_emb_head_dim  # one compressed vector for all heads
    return 2 * heads * facts.kv_channels


def _engine_facts(args: Namespace) -> Namespace | None:
    """The architecture; without a trainer it is read from the model's config. None where that isn't enough."""
    if not args.debug_rollout_only:
        return args
    from slime.utils.arguments.hf_facts import config_from_hf
    from slime.utils.arguments.rules.loading import read_hf_config

    facts: dict[str, Any] = {**vars(args), **config_from_hf(read_hf_config(args.hf_checkpoint))}
    facts.setdefault("padded_vocab_size", None)
    facts["padded_vocab_size"] = facts["padded_vocab_size"] or facts.get("vocab_size")
    if facts.get("num_query_groups") is None:
        facts["num_query_groups"] = facts.get("num_attention_heads")
    width = "kv_lora_rank" if facts.get("multi_latent_attention") else "kv_channels"
    complete = all(facts.get(name) for name in ("num_layers", "num_query_groups", width, "padded_vocab_size"))
    return Namespace(**facts) if complete else None


def _model_parameters(facts: Namespace) -> int:
    """Parameters of the whole model: those of a rank that splits nothing."""
    from slime.utils.dry_run.parameters import count_rank_parameters

    names = (
        "tensor_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size",
        "pipeline_model_parallel_size",
    )  # fmt: skip
    whole = Namespace(**{**vars(facts), **dict.fromkeys(names, 1)})
    for name in ("virtual_pipeline_model_parallel_size", "decoder_first_pipeline_num_layers",
                 "decoder_last_pipeline_num_layers"):  # fmt: skip
        setattr(whole, name, None)
    whole.account_for_embedding_in_pipeline_split = whole.account_for_loss_in_pipeline_split = False
    whole.padded_vocab_size = facts.vocab_size or facts.padded_vocab_size
    return count_rank_parameters(whole, 0).total
