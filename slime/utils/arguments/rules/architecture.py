"""The model's architecture: from `--hf-checkpoint`, from flags, and the two compared."""

from __future__ import annotations

import math
from typing import Any

from slime.utils.arguments.hf_facts import (
    TRAINING_CHOICES,
    config_from_hf,
    expand_layer_pattern,
    has_dense_layer,
    linear_attention_pattern,
)
from slime.utils.arguments.rules.context import Context
from slime.utils.arguments.rules.loading import is_hf_checkpoint, read_hf_config


def resolve_architecture(context: Context) -> None:
    """Fill architecture flags that were not given from the config; given ones must agree with it."""
    args = context.args
    if is_hf_checkpoint(args.hf_checkpoint):
        apply_facts(context, config_from_hf(read_hf_config(args.hf_checkpoint)), f"{args.hf_checkpoint}/config.json")
    missing = [
        context.name(dest) for dest in ("num_layers", "hidden_size", "num_attention_heads") if not getattr(args, dest)
    ]
    if missing:
        context.problems.add(
            f"the architecture is incomplete: {', '.join(missing)} not given and not in a config.json"
        )
        return
    context.fill_none("ffn_hidden_size", 4 * args.hidden_size)
    context.fill_none("kv_channels", args.hidden_size // args.num_attention_heads)
    context.fill_none("num_query_groups", args.num_attention_heads)
    if args.num_query_groups != args.num_attention_heads:
        context.force("group_query_attention", True, context.shown("num_query_groups"))
    context.fill_none("max_position_embeddings", args.seq_length)
    context.fill_none("rope_type", "yarn" if args.multi_latent_attention else "rope")
    _resolve_vocabulary(context)


def resolve_engine_vocabulary(context: Context) -> None:
    """Engines without a trainer need the vocabulary size alone: token ids are checked against it."""
    args = context.args
    if args.vocab_size is None and is_hf_checkpoint(args.hf_checkpoint):
        args.vocab_size = config_from_hf(read_hf_config(args.hf_checkpoint)).get("vocab_size")


def apply_facts(context: Context, facts: dict[str, Any], source: str) -> None:
    """Compare the facts with what was given, and fill in the rest; every difference is one problem."""
    for dest, value in facts.items():
        if not context.given(dest):
            setattr(context.args, dest, value)
        elif dest in TRAINING_CHOICES or (dest == "ffn_hidden_size" and not has_dense_layer(facts)):
            continue
        elif not agrees(dest, getattr(context.args, dest), value, facts):
            context.problems.add(f"{context.shown(dest)} does not match {source}, which has {value}")


def agrees(dest: str, given: Any, fact: Any, facts: dict[str, Any]) -> bool:
    """Whether a given value of `dest` means what the config says; `facts` are all that it says."""
    if dest == "moe_layer_freq":
        return expand_layer_pattern(given, facts["num_layers"]) == expand_layer_pattern(fact, facts["num_layers"])
    if dest == "linear_attention_freq":
        layers = facts["num_layers"]
        return linear_attention_pattern(given, layers) == linear_attention_pattern(fact, layers)
    if dest in ("moe_router_num_groups", "moe_router_group_topk", "moe_router_topk_scaling_factor"):
        return (given or 1) == (fact or 1)
    if isinstance(given, int | float) and isinstance(fact, int | float):
        return math.isclose(given, fact, rel_tol=1e-6)
    return given == fact


def _resolve_vocabulary(context: Context) -> None:
    args = context.args
    if args.vocab_size is None and args.padded_vocab_size is None:
        context.problems.add("--vocab-size is needed: there is no config.json to read it from")
        return
    tensor = args.tensor_model_parallel_size
    if args.padded_vocab_size is None:
        multiple = args.make_vocab_size_divisible_by * tensor
        args.padded_vocab_size = math.ceil(args.vocab_size / multiple) * multiple
        return
    context.fill_none("vocab_size", args.padded_vocab_size)
    context.require(
        args.padded_vocab_size >= args.vocab_size and args.padded_vocab_size % tensor == 0,
        f"{context.shown('padded_vocab_size')} must be a multiple of tensor parallel size {tensor} and at least the "
        f"vocabulary size {args.vocab_size}",
    )
