"""On-policy distillation."""

from __future__ import annotations

from slime.utils.arguments.flag import flag, in_group, switch
from slime.utils.arguments.groups.pending import ALGORITHMS

FLAGS = in_group(
    "On-policy distillation",
    [
        switch("--use-opd", "learn from a teacher's log-probs on own samples", pending=ALGORITHMS),
        flag("--opd-type", str, None, "where the teacher runs", choices=("sglang", "megatron"), pending=ALGORITHMS),
        flag("--opd-kl-coef", float, 1.0, "weight of the reverse KL in advantages", pending=ALGORITHMS),
        flag("--opd-teacher-load", str, None, "the teacher's Megatron checkpoint", pending=ALGORITHMS),
        flag("--opd-teacher-ckpt-step", int, None, "iteration of that checkpoint", pending=ALGORITHMS),
    ],
)
