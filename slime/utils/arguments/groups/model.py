"""The model: where it comes from, what of it trains, how log-probs are computed."""

from __future__ import annotations

from slime.utils.arguments.flag import flag, in_group, positive_int, switch
from slime.utils.arguments.groups.pending import MODELS

FLAGS = in_group(
    "Model",
    [
        flag(
            "--hf-checkpoint",
            str,
            None,
            "Hugging Face folder: the engines' weights, the tokenizer, and the architecture (flags not given are "
            "read from its config.json; given ones must agree)",
        ),
        flag(
            "--model-name",
            str,
            None,
            "model family for the weight conversion; unset: from the config",
            pending=MODELS,
        ),
        flag("--custom-model-provider-path", str, None, "function that builds the model"),
        switch("--fp32", "weights and activations in float32 (the CPU's default)"),
        flag("--padded-vocab-size", int, None, "vocabulary size after padding; unset: computed"),
        flag("--vocab-size", int, None, "vocabulary size; unset: from --hf-checkpoint"),
        switch("--recompute-loss-function", "recompute the loss in the backward pass to save memory"),
        flag(
            "--log-probs-chunk-size", int, -1, "tokens per chunk of the log-prob computation; 0 or below: all at once"
        ),
        flag(
            "--only-train-params-name-list",
            str,
            None,
            "regular expressions (re.search) of the parameters that train; all others are frozen",
            nargs="*",
        ),
        flag("--freeze-params-name-list", str, None, "regular expressions of the parameters to freeze", nargs="*"),
        switch("--freeze-indexer", "freeze the weights of a sparse-attention indexer", pending=MODELS),
        switch("--allgather-cp", "contiguous context-parallel layout of sparse-attention models", pending=MODELS),
        switch(
            "--qk-layernorm-over-heads",
            "--qk-layernorm norms the queries, and the keys, of all heads together (MiniMax-M2)",
        ),
        flag(
            "--qwen-gdn-backend",
            str,
            "fla",
            "kernels of gated delta net layers on a GPU: flash-linear-attention, or plain PyTorch as on other devices",
            choices=("fla", "flashqla", "torch"),
            pending_choices={"flashqla": MODELS},
        ),
        flag(
            "--vision-tower",
            str,
            None,
            "the vision tower of --hf-checkpoint in the trainer: left out, as it is, or trained too; unset: frozen "
            "with --multimodal-keys, else off",
            choices=("off", "frozen", "trained"),
        ),
        flag("--mtp-num-layers", positive_int, None, "multi-token-prediction layers to build"),
        flag("--mtp-loss-scaling-factor", float, 0.2, "weight of the multi-token-prediction loss"),
        switch("--enable-mtp-training", "train the multi-token-prediction layers; without it they stay as they are"),
    ],
)
