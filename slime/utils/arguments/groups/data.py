"""Prompts, batch sizes and how samples are laid out over steps and micro-batches."""

from __future__ import annotations

from slime.utils.arguments.flag import flag, in_group, json_value, off_switch, positive_int, switch

FLAGS = in_group(
    "Data",
    [
        flag("--num-rollout", int, None, "number of rollouts; 0: evaluate only"),
        flag("--num-epoch", positive_int, None, "passes over the prompts; used where --num-rollout is unset"),
        off_switch(
            "--disable-rollout-global-dataset",
            "rollout_global_dataset",
            "the rollout function brings its own prompts",
        ),
        flag(
            "--data-source-path",
            str,
            "slime.rollout.data_source.RolloutDataSourceWithBuffer",
            "class that hands out prompts",
        ),
        flag(
            "--prompt-data",
            str,
            None,
            "prompts: .jsonl or .parquet files, or save_to_disk folders; rows a to b as file@[a:b], and the share of"
            " each of several as file:0.7",
            nargs="+",
        ),
        switch("--apply-chat-template", "render messages with the tokenizer's chat template while loading"),
        flag("--apply-chat-template-kwargs", json_value, {}, "JSON object of arguments for the chat template"),
        flag("--input-key", str, "input", "column of the prompt"),
        flag("--label-key", str, None, "column of the label"),
        flag("--multimodal-keys", json_value, None, "JSON object: image, video or audio to column"),
        flag("--metadata-key", str, "metadata", "column of the metadata"),
        flag("--tool-key", str, "tools", "column of the tools"),
        flag("--rollout-batch-size", positive_int, None, "prompts (groups) per rollout", required=True),
        flag("--n-samples-per-prompt", positive_int, 1, "responses per prompt"),
        flag("--global-batch-size", positive_int, None, "samples per optimiser step"),
        flag("--num-steps-per-rollout", positive_int, None, "optimiser steps per rollout, instead of the above"),
        flag("--micro-batch-size", positive_int, 1, "samples per micro-batch (without --use-dynamic-batch-size)"),
        switch("--balance-data", "balance the data-parallel ranks by estimated work"),
        switch("--balance-by-flops", "also pack micro-batches by estimated work"),
        switch("--use-dynamic-batch-size", "pack micro-batches by tokens, up to --max-tokens-per-gpu"),
        flag("--max-tokens-per-gpu", positive_int, None, "tokens of one micro-batch per device"),
    ],
)
