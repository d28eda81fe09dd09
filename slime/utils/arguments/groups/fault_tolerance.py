"""Watching engines and replacing dead ones."""

from __future__ import annotations

from slime.utils.arguments.flag import flag, in_group, switch
from slime.utils.arguments.groups.pending import FAULT_TOLERANCE

FLAGS = in_group(
    "Fault tolerance",
    [
        switch("--use-fault-tolerance", "watch the engines and restart dead ones", pending=FAULT_TOLERANCE),
        flag("--rollout-health-check-interval", float, 30.0, "seconds between rounds", pending=FAULT_TOLERANCE),
        flag("--rollout-health-check-timeout", float, 30.0, "seconds per probe", pending=FAULT_TOLERANCE),
        flag(
            "--rollout-health-check-first-wait",
            float,
            0.0,
            "seconds of grace each time the engines come back",
            pending=FAULT_TOLERANCE,
        ),
    ],
)
