"""The Megatron teacher server."""

from __future__ import annotations

from slime.utils.arguments.flag import flag, in_group, positive_int, switch
from slime.utils.arguments.groups.pending import TEACHER

FLAGS = in_group(
    "Teacher server",
    [
        flag("--teacher-port", positive_int, 7999, "port", pending=TEACHER),
        flag("--teacher-warmup-port", positive_int, 7999, "port of the warm-up requests", pending=TEACHER),
        flag("--teacher-warmup-timeout-s", positive_int, 3000, "deadline of the warm-up", pending=TEACHER),
        flag(
            "--teacher-sample-reduction-chunk-size",
            positive_int,
            4096,
            "rows per chunk when sampling",
            pending=TEACHER,
        ),
        flag(
            "--teacher-label-reduction-chunk-size",
            positive_int,
            4096,
            "rows per chunk of label log-probs",
            pending=TEACHER,
        ),
        flag("--megatron-server-max-length", int, 0, "longest request, 0: no limit", pending=TEACHER),
        flag("--megatron-server-update-timeout-s", float, 3600.0, "wait for idle before a reload", pending=TEACHER),
        switch("--megatron-server-warmup", "warm up at the start", default=True, pending=TEACHER),
    ],
)
