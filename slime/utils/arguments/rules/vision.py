"""Models that see: whether the trainer has the vision tower, and what it can be trained with."""

from __future__ import annotations

from slime.utils.arguments.hf_facts import VISION_MODELS
from slime.utils.arguments.rules.context import Context
from slime.utils.arguments.rules.loading import is_hf_checkpoint, read_hf_config
from slime_plugins.models import find_model_plugin

_KNOWN = " and ".join(sorted(VISION_MODELS))


def resolve_vision(context: Context) -> None:
    """`--vision-tower`, from `--multimodal-keys` where it is not given."""
    args = context.args
    checkpoint = args.hf_checkpoint
    config = read_hf_config(checkpoint) if is_hf_checkpoint(checkpoint) else {}
    kind = config.get("model_type", "")
    has_tower = "vision_config" in config
    if has_tower and kind not in VISION_MODELS and find_model_plugin(kind) is None:
        context.problems.add(
            f"{checkpoint} is a {kind} with a vision tower, which has no weight table; of models that see, {_KNOWN} "
            "can be trained"
        )
    trainable = has_tower and kind in VISION_MODELS
    context.fill_none("vision_tower", "frozen" if args.multimodal_keys and trainable else "off")
    if args.vision_tower != "off":
        _check_tower(context, trainable)
    elif args.multimodal_keys:
        context.problems.add(
            "--multimodal-keys: the trainer holds a text model, it can't train on images, video or audio; images need "
            f"a --hf-checkpoint of {_KNOWN} with a vision tower, and --vision-tower frozen or trained; "
            "--debug-rollout-only takes them all"
        )


def _check_tower(context: Context, trainable: bool) -> None:
    args, name = context.args, context.name("vision_tower")
    context.require(trainable, f"{name} {args.vision_tower} needs a --hf-checkpoint of {_KNOWN} with a vision tower")
    others = sorted(set(args.multimodal_keys or {}) - {"image"})
    context.require(not others, f"--multimodal-keys: the trainer takes images, not {' and '.join(others)}")
    for dest in ("mtp_num_layers", "lora_rank", "custom_model_provider_path"):
        context.require(
            getattr(args, dest) is None, f"{name} {args.vision_tower} does not work with {context.name(dest)}"
        )
    # the fused kernel takes a token's place from the start of its sequence
    context.force("apply_rope_fusion", False, name)
