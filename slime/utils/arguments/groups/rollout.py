"""Sampling: the rollout function, its sampling parameters, filters and hooks."""

from __future__ import annotations

from slime.utils.arguments.flag import flag, in_group, non_negative_int, positive_int, switch
from slime.utils.arguments.groups.pending import DISAGGREGATED

FLAGS = in_group(
    "Rollout",
    [
        flag(
            "--rollout-function-path",
            str,
            "slime.rollout.sglang_rollout.generate_rollout",
            "function that turns prompts into scored samples",
        ),
        flag(
            "--rollout-temperature",
            float,
            1.0,
            "sampling temperature; the trainer divides its logits by the same value",
        ),
        flag("--rollout-top-p", float, 1.0, "nucleus sampling"),
        flag("--rollout-top-k", int, -1, "top-k sampling; -1: off"),
        flag("--rollout-max-context-len", positive_int, None, "longest prompt and response together, in tokens"),
        flag("--rollout-max-prompt-len", positive_int, None, "prompts with more tokens are dropped when loading"),
        flag("--rollout-max-response-len", positive_int, None, "longest response, in tokens"),
        switch("--rollout-skip-special-tokens", "leave special tokens out of the response text"),
        flag("--rollout-stop", str, None, "texts that end a response", nargs="+"),
        flag("--rollout-stop-token-ids", int, None, "token ids that end a response", nargs="+"),
        switch("--rollout-shuffle", "shuffle the prompts at each epoch"),
        flag("--rollout-seed", int, 42, "seed of the shuffle, and base of the samples' seeds"),
        flag(
            "--over-sampling-batch-size",
            positive_int,
            None,
            "groups requested each time too few are on the way; unset: --rollout-batch-size",
        ),
        flag("--dynamic-sampling-filter-path", str, None, "function that keeps or drops a finished group"),
        flag(
            "--dynamic-sampling-max-drops",
            positive_int,
            50,
            "groups that the filter may drop per group of the batch, before the run ends with its reasons",
        ),
        flag(
            "--max-staleness",
            non_negative_int,
            None,
            "fully-async rollout: weight updates that a group's oldest token may be behind when the group is handed to"
            " training; staler groups are generated anew",
        ),
        switch("--partial-rollout", "keep groups that were cut off and go on with them in a later rollout"),
        switch("--mask-offpolicy-in-partial-rollout", "leave tokens made before the cut out of the loss"),
        flag("--custom-generate-function-path", str, None, "function that generates one sample"),
        flag(
            "--rollout-sample-hook-path",
            str,
            [],
            "function called on each sample between generation and reward; may be repeated",
            nargs="append",
        ),
        flag("--custom-rollout-log-function-path", str, None, "function that logs a rollout instead of the default"),
        flag(
            "--custom-eval-rollout-log-function-path",
            str,
            None,
            "function that logs an evaluation instead of the default",
        ),
        flag("--buffer-filter-path", str, None, "function that takes groups out of the buffer"),
        flag("--rollout-sample-filter-path", str, None, "function that marks samples to leave out of the loss"),
        flag("--rollout-all-samples-process-path", str, None, "function that sees every generated group"),
        switch("--keep-old-actor", "compute old log-probs under the weights that sampled the rollout"),
        flag(
            "--rollout-data-postprocess-path",
            str,
            None,
            "function that edits the rollout data on the trainer once advantages are there",
        ),
        flag(
            "--rollout-data-transport",
            str,
            "object-store",
            "how train data reaches the trainers",
            choices=("object-store", "nixl"),
            pending_choices={"nixl": DISAGGREGATED},
        ),
        flag(
            "--rollout-external-engine-addrs",
            str,
            None,
            "addresses (host:port) of running SGLang servers to use instead of starting engines",
            nargs="+",
        ),
        flag("--data-pad-size-multiplier", positive_int, 128, "packed tokens are padded to a multiple of it x TP"),
        flag(
            "--loss-mask-type",
            str,
            "qwen",
            "chat format of multi-turn loss masks; one method serves all of them (docs/loss-masks.md)",
            choices=("general", "qwen", "qwen3", "qwen3_5", "distill_qwen", "glm4", "llama3"),
        ),
    ],
)
