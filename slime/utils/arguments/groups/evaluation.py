"""Evaluation during training."""

from __future__ import annotations

from slime.utils.arguments.flag import flag, in_group, positive_int, switch

FLAGS = in_group(
    "Evaluation",
    [
        flag("--eval-function-path", str, None, "rollout function of evaluations; unset: --rollout-function-path"),
        flag("--eval-interval", positive_int, None, "rollouts between evaluations"),
        flag("--eval-prompt-data", str, None, "name and file of each data set: name1 file1 name2 file2", nargs="+"),
        flag("--eval-config", str, None, "YAML file of data sets and their settings; instead of the above"),
        switch("--skip-eval-before-train", "no evaluation before the first rollout"),
        flag("--eval-input-key", str, None, "as --input-key"),
        flag("--eval-label-key", str, None, "as --label-key"),
        flag("--eval-tool-key", str, None, "as --tool-key"),
        flag("--n-samples-per-eval-prompt", positive_int, 1, "responses per prompt"),
        flag("--eval-temperature", float, None, "as --rollout-temperature; 0 is greedy"),
        flag("--eval-top-p", float, None, "as --rollout-top-p"),
        flag("--eval-top-k", int, None, "as --rollout-top-k"),
        flag("--eval-max-response-len", positive_int, None, "as --rollout-max-response-len"),
        flag("--eval-max-prompt-len", positive_int, None, "as --rollout-max-prompt-len"),
        flag("--eval-min-new-tokens", int, None, "shortest response, in tokens"),
        flag("--eval-max-context-len", positive_int, None, "as --rollout-max-context-len"),
    ],
)
