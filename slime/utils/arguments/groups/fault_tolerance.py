"""Watching engines and replacing dead ones; starting again from a checkpoint."""

from __future__ import annotations

from slime.utils.arguments.flag import flag, in_group, non_negative_int, switch

FLAGS = in_group(
    "Fault tolerance",
    [
        switch("--use-fault-tolerance", "watch engines and routers, and replace those that die or hang"),
        flag("--rollout-health-check-interval", float, 30.0, "seconds between rounds of probes"),
        flag("--rollout-health-check-timeout", float, 30.0, "seconds that an engine has to answer a probe"),
        flag("--rollout-health-check-first-wait", float, 0.0, "seconds without probes each time generation begins"),
        flag(
            "--max-restarts",
            non_negative_int,
            0,
            "how often a run that failed is started again, from its last checkpoint in --save",
        ),
    ],
)
