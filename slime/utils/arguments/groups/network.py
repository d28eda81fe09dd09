"""The router in front of the engines, and the clients that call it."""

from __future__ import annotations

from slime.utils.arguments.flag import flag, in_group, positive_int, switch
from slime.utils.arguments.groups.pending import DISAGGREGATED, ROLLOUT

FLAGS = in_group(
    "Router and engines",
    [
        flag("--sglang-router-ip", str, None, "address of a running router to use"),
        flag("--sglang-router-port", positive_int, None, "its port; without --sglang-router-ip the port to listen on"),
        flag("--sglang-router-request-timeout-secs", positive_int, 14400, "deadline of a request"),
        flag("--sglang-server-concurrency", positive_int, 512, "requests on the way per engine"),
        flag("--prefill-num-servers", positive_int, None, "engines that only prefill; the others only decode"),
        flag("--sglang-config", str, None, "YAML file of models and server groups (docs/serving.md)"),
        switch("--use-slime-router", "slime's own router, which keeps each session's tokens (docs/serving.md)"),
        flag(
            "--slime-router-middleware-paths",
            str,
            None,
            "functions (request, handler) that every request to slime's router passes through, the first outermost",
            nargs="+",
        ),
        switch("--use-distributed-post", "send requests from several Ray actors", pending=DISAGGREGATED),
        flag("--rollout-buffer-url", str, None, "URL of a rollout buffer server", pending=ROLLOUT),
        flag("--fetch-trajectory-retry-times", int, -1, "tries to fetch from it; -1: for ever", pending=ROLLOUT),
        flag("--rollout-task-type", str, "math", "generator that the buffer uses", pending=ROLLOUT),
    ],
)
