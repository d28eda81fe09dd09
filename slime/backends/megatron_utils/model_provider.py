"""Build one chunk of the model: Megatron's GPTModel, the user's layer spec, or the user's own provider."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from slime.backends.megatron_utils.arguments import transformer_config_from_args
from slime.backends.megatron_utils.layer_spec import decoder_block_spec
from slime.backends.megatron_utils.value_head import attach_value_head
from slime.utils.accelerator import current
from slime.utils.misc import load_function

ROLES = ("actor", "ref", "critic")
ModelProvider = Callable[..., torch.nn.Module]

# Far below any real logit, finite so that p * log(p) stays 0 at temperatures down to 1e-30.
_PADDED_LOGIT = -1.0e4


def get_model_provider_func(args: argparse.Namespace, role: str = "actor") -> ModelProvider:
    """`provider(pre_process, post_process, vp_stage=None) -> model`: the user's, or GPTModel with `--spec`'s layers.

    With `--lora-rank` only its adapters train; else the provider freezes parameters as `--only-train-params-name-list`
    / `--freeze-params-name-list` say. A critic's last chunk ends in a value head.

    Raises:
        ValueError: an unknown role.
    """
    if role not in ROLES:
        raise ValueError(f"the role {role!r} has no model; known: {', '.join(ROLES)}")
    provider = _select_provider(args, role)

    def provide(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> torch.nn.Module:
        extra = {"vp_stage": vp_stage} if "vp_stage" in inspect.signature(provider).parameters else {}
        model = provider(pre_process=pre_process, post_process=post_process, **extra)
        if post_process and role == "critic":
            attach_value_head(model, args.seed)
        elif post_process:
            mask_padded_vocabulary(model, args.vocab_size)
        if not args.enable_mtp_training and hasattr(model, "freeze_prediction_layers"):
            model.freeze_prediction_layers()
        if args.lora_rank is None:
            freeze_parameters(model, args)
        else:
            from slime.backends.megatron_utils.lora.attach import attach_adapters

            attach_adapters(model, args)
        return model

    return provide


def _select_provider(args: argparse.Namespace, role: str) -> ModelProvider:
    if args.custom_model_provider_path:
        return load_function(args.custom_model_provider_path)
    if not args.spec:
        return lambda pre_process, post_process, vp_stage=None: _gpt_model(
            args, role, decoder_block_spec, pre_process, post_process, vp_stage
        )
    spec = load_function(".".join(args.spec)) if not isinstance(args.spec, str) else load_function(args.spec)
    if "pre_process" in inspect.signature(spec).parameters:
        return spec
    return lambda pre_process, post_process, vp_stage=None: _gpt_model(
        args, role, spec, pre_process, post_process, vp_stage
    )


def _gpt_model(
    args: argparse.Namespace,
    role: str,
    make_spec: Callable[[argparse.Namespace, Any, int | None], Any],
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None,
) -> torch.nn.Module:
    # a critic predicts values, nothing ahead
    config = transformer_config_from_args(args, **({"mtp_num_layers": None} if role == "critic" else {}))
    spec = make_spec(args, config, vp_stage)
    if callable(spec) and "pre_process" in inspect.signature(spec).parameters:
        # a spec function may also choose to return a whole provider
        return spec(pre_process=pre_process, post_process=post_process, vp_stage=vp_stage)
    from megatron.core.models.gpt import GPTModel

    from slime.backends.megatron_utils.moe.router import use_packed_routers

    use_packed_routers(spec)
    model_class: type[GPTModel] = GPTModel
    extra: dict[str, Any] = {}
    if args.vision_tower != "off":
        from slime.backends.megatron_utils.vision.model import VisionGPTModel

        model_class, extra = VisionGPTModel, {"args": args}
    if config.mtp_num_layers:
        from slime.backends.megatron_utils.multi_token_prediction import MultiTokenGPTModel, prediction_block_spec

        model_class = MultiTokenGPTModel
        extra = {"mtp_block_spec": prediction_block_spec(config, spec, vp_stage)}
    return model_class(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        vp_stage=vp_stage,
        **extra,
    )


def mask_padded_vocabulary(model: torch.nn.Module, vocab_size: int) -> None:
    """Take the vocabulary's padding rows out of every softmax: their logits become very small.

    Without it a padded row's logit (0 for a zero row) adds to the normaliser, and log-probs differ from the engine's.
    """
    output_layer = getattr(model, "output_layer", None)
    if output_layer is None or getattr(model, "vocab_size", vocab_size) == vocab_size:
        return
    from megatron.core import parallel_state

    rows = model.vocab_size // parallel_state.get_tensor_model_parallel_world_size()
    first_padded = vocab_size - parallel_state.get_tensor_model_parallel_rank() * rows
    if first_padded >= rows:
        return

    def mask(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        output[0][..., max(first_padded, 0) :] = _PADDED_LOGIT

    output_layer.register_forward_hook(mask)


def freeze_parameters(model: torch.nn.Module, args: argparse.Namespace) -> None:
    """Freeze what `--freeze-params-name-list` names, or all but what `--only-train-params-name-list` names.

    Both are regular expressions, searched in the parameter names of the model chunk.
    """
    frozen, trained = args.freeze_params_name_list, args.only_train_params_name_list
    if not frozen and not trained:
        return
    for name, parameter in model.named_parameters():
        if (trained and not _matches(trained, name)) or (frozen and _matches(frozen, name)):
            parameter.requires_grad_(False)


def check_freeze_patterns(model: Sequence[torch.nn.Module], args: argparse.Namespace) -> None:
    """ValueError for a freeze pattern that matches no parameter on any rank; all ranks take part."""
    patterns = [*(args.freeze_params_name_list or []), *(args.only_train_params_name_list or [])]
    if not patterns:
        return
    names = [name for chunk in model for name, _ in chunk.named_parameters()]
    found = torch.tensor([float(any(re.search(pattern, name) for name in names)) for pattern in patterns])
    found = found.to(current().device())
    torch.distributed.all_reduce(found)
    unmatched = [pattern for pattern, count in zip(patterns, found.tolist(), strict=True) if count == 0]
    if unmatched:
        raise ValueError(
            "no parameter's name matches these patterns of --freeze-params-name-list / --only-train-params-name-list: "
            + ", ".join(map(repr, unmatched))
        )


def _matches(patterns: Sequence[str], name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)
