"""Places in the trainer where a user's function is called."""

from __future__ import annotations

from slime.utils.arguments.flag import flag, in_group
from slime.utils.arguments.groups.pending import MODELS

FLAGS = in_group(
    "Trainer hooks",
    [
        flag("--custom-megatron-init-path", str, None, "function called once model parallelism is set up"),
        flag(
            "--custom-megatron-before-log-prob-hook-path", str, None, "function called before each forward-only pass"
        ),
        flag(
            "--custom-megatron-before-train-step-hook-path",
            str,
            None,
            "function called at each optimiser step, once gradients are zeroed",
        ),
        flag(
            "--megatron-deepgemm-forward-layers",
            int,
            None,
            "decoder layers with DeepGEMM's dense forward",
            nargs="+",
            pending=MODELS,
        ),
        flag("--megatron-deepgemm-forward-modules", str, None, "name endings to replace", nargs="+", pending=MODELS),
        flag(
            "--megatron-deepgemm-moe-forward-layers",
            int,
            None,
            "decoder layers with DeepGEMM's expert forward",
            nargs="+",
            pending=MODELS,
        ),
        flag(
            "--megatron-deepgemm-moe-forward-modules",
            str,
            None,
            "name endings to replace",
            nargs="+",
            pending=MODELS,
        ),
    ],
)
