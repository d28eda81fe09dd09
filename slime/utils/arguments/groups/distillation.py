"""On-policy distillation."""

from __future__ import annotations

from slime.utils.arguments.flag import flag, in_group, switch

FLAGS = in_group(
    "On-policy distillation",
    [
        switch("--use-opd", "learn from a teacher's log-probs on own samples"),
        flag("--opd-type", str, None, "where the teacher runs", choices=("sglang", "megatron")),
        flag("--opd-kl-coef", float, 1.0, "weight of the reverse KL in advantages"),
        flag("--opd-teacher-load", str, None, "the teacher's Megatron checkpoint"),
        flag("--opd-teacher-ckpt-step", int, None, "iteration of that checkpoint"),
    ],
)
