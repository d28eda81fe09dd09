"""Hooks into the trainer: set-up, passes, and the model itself."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

logger = logging.getLogger(__name__)


def announce(args: Namespace) -> None:
    """Called on every rank when process groups exist, before the model is built."""
    logger.info("trainer with %d data-parallel ranks", args.data_parallel_size)


def evaluate_without_dropout(args: Namespace, model_chunks: Sequence[Any], store_prefix: str) -> None:
    """Called before each forward-only pass; `store_prefix` is "" for the actor, "ref_" for the reference."""
    for chunk in model_chunks:
        chunk.eval()


def halve_rate_at_first(
    args: Namespace, rollout_id: int, step_id: int, model: Sequence[Any], optimizer: Any, opt_param_scheduler: Any
) -> None:
    """Called before each optimiser step, after gradients were zeroed: half the learning rate in the first rollout."""
    if rollout_id == 0:
        for group in optimizer.param_groups:
            group["lr"] = args.lr / 2


def small_model(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> Any:
    """A GPT model of fixed sizes; this rank's pipeline stage decides whether it has embedding and output layer."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig

    from slime.utils import accelerator

    device = accelerator.current()
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, **device.megatron_config_overrides()
    )  # fmt: skip
    return GPTModel(
        config,
        device.layer_spec(config, vp_stage),
        vocab_size=512,
        max_sequence_length=1024,
        position_embedding_type="rope",
        pre_process=pre_process,
        post_process=post_process,
        vp_stage=vp_stage,
    )


def layers_of_this_device(args: Namespace, config: Any, vp_stage: int | None) -> Any:
    """`--spec examples.hooks.megatron layers_of_this_device`: the layers that slime would take by itself."""
    from slime.utils import accelerator

    return accelerator.current().layer_spec(config, vp_stage=vp_stage)
