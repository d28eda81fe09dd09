"""The model's number format."""

from __future__ import annotations

from slime.utils.accelerator import current
from slime.utils.arguments.rules.context import Context

_FLAGS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def resolve_precision(context: Context) -> None:
    """`params_dtype` from `--bf16`, `--fp16` or `--fp32`, else what the device is best at."""
    args = context.args
    wanted = [dest for dest in _FLAGS if getattr(args, dest)]
    if len(wanted) > 1:
        context.problems.add(f"{' and '.join(context.name(dest) for dest in wanted)} exclude each other")
    args.params_dtype = _FLAGS[wanted[0]] if wanted else current().default_dtype
    for dest, dtype in _FLAGS.items():
        setattr(args, dest, dtype == args.params_dtype)
    if args.bf16:
        # summing bfloat16 gradients in bfloat16 loses small ones
        context.fill("accumulate_allreduce_grads_in_fp32", True)
    context.force("distributed_backend", current().collective_backend, f"the device ({current().name})")


def report_device_limits(context: Context) -> None:
    """Names settings given that this device can't do; none of them changes what is computed."""
    from slime.utils.arguments.megatron_names import attribute_of

    off = [
        context.shown(attribute_of(field))
        for field, value in current().megatron_config_overrides().items()
        if context.given(attribute_of(field)) and getattr(context.args, attribute_of(field)) != value
    ]
    if off:
        context.notice("not available on this device (%s), without effect: %s", current().name, ", ".join(off))
