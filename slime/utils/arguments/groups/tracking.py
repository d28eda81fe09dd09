"""Metrics: where they go."""

from __future__ import annotations

from slime.utils.arguments.flag import flag, in_group, off_switch, switch

FLAGS = in_group(
    "Metrics",
    [
        flag(
            "--log-dir",
            str,
            None,
            "folder of metrics and process logs; unset: outputs/<run name>-<time>",
        ),
        off_switch("--no-metrics-jsonl", "metrics_jsonl", "don't write <log dir>/metrics.jsonl"),
        switch("--use-wandb", "log to Weights & Biases"),
        flag(
            "--wandb-mode",
            str,
            None,
            "unset: WANDB_MODE, or offline",
            choices=("online", "offline", "disabled"),
        ),
        flag("--wandb-dir", str, None, "folder of its local files"),
        flag("--wandb-key", str, None, "login key"),
        flag("--wandb-host", str, None, "URL of the server"),
        flag("--wandb-team", str, None, "entity"),
        flag("--wandb-group", str, None, "group, and base of the run's name"),
        flag("--wandb-project", str, None, "project"),
        off_switch("--disable-wandb-random-suffix", "wandb_random_suffix", "no random suffix on the run's name"),
        switch("--wandb-always-use-train-step", "count optimiser steps instead of rollouts"),
        flag("--wandb-run-id", str, None, "run to continue"),
        switch("--log-multi-turn", "log multi_turn/* metrics"),
        switch("--log-passrate", "log pass@k"),
        flag("--log-reward-category", str, None, "key of the reward whose values are counted"),
        switch("--log-correct-samples", "log the response lengths of correct samples"),
        switch("--use-tensorboard", "log to TensorBoard"),
        flag("--tb-project-name", str, None, "first part of its folder"),
        flag("--tb-experiment-name", str, None, "second part; unset: the time"),
    ],
)
