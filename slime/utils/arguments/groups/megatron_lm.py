"""Flags of Megatron-LM's command line that no megatron-core config has a field for."""

from __future__ import annotations

from slime.utils.arguments.flag import flag, in_group, off_switch, positive_int, switch
from slime.utils.arguments.groups.pending import MODELS

_ARCHITECTURE = in_group(
    "Megatron: architecture",
    [
        switch("--swiglu", "gated SiLU activation in the MLP"),
        switch("--squared-relu", "squared ReLU activation in the MLP"),
        switch("--quick-geglu", "gated quick-GELU activation in the MLP"),
        switch("--group-query-attention", "fewer key and value heads than query heads (--num-query-groups)"),
        switch("--untie-embeddings-and-output-weights", "separate weights for the embedding and the output layer"),
        flag(
            "--position-embedding-type",
            str,
            "rope",
            "position embedding",
            choices=("learned_absolute", "rope", "yarn", "mrope", "relative", "none"),
        ),
        switch("--use-rotary-position-embeddings", "short for --position-embedding-type rope"),
        flag("--rotary-seq-len-interpolation-factor", int, None, "linear interpolation of positions"),
        switch("--use-rope-scaling", "Llama 3's scaling of rotary frequencies"),
        flag("--rope-scaling-factor", float, 8.0, "its factor"),
        flag("--max-position-embeddings", positive_int, None, "positions that the model has; unset: --seq-length"),
        flag("--seq-length", positive_int, 4096, "only a placeholder: sequences are packed with their own lengths"),
        flag("--make-vocab-size-divisible-by", positive_int, 128, "the vocabulary is padded to a multiple of it x TP"),
        flag("--spec", str, None, "module and function that give the layer spec or build the model", nargs=2),
        switch("--post-self-attn-layernorm", "norm after the attention's output projection (GLM-4)"),
        switch("--post-mlp-layernorm", "norm after the MLP (GLM-4)"),
        switch("--enable-experimental", "megatron-core's experimental features", pending=MODELS),
    ],
)

_TRAINING = in_group(
    "Megatron: training",
    [
        flag("--seed", positive_int, 1234, "the trainer's seed; engines use it plus their rank"),
        off_switch("--no-bias-swiglu-fusion", "bias_swiglu_fusion", "don't fuse bias and SwiGLU"),
        off_switch("--no-bias-gelu-fusion", "bias_gelu_fusion", "don't fuse bias and GELU"),
        switch("--recompute-activations", "short for --recompute-granularity selective"),
        switch("--use-flash-attn", "short for --attention-backend flash"),
        flag(
            "--num-layers-per-virtual-pipeline-stage",
            positive_int,
            None,
            "layers of a virtual stage, instead of --virtual-pipeline-model-parallel-size",
        ),
        flag(
            "--num-virtual-stages-per-pipeline-rank",
            positive_int,
            None,
            "the same as --virtual-pipeline-model-parallel-size, under Megatron-LM's name",
        ),
        switch("--use-distributed-optimizer", "always on", default=True),
        switch("--use-tp-pp-dp-mapping", "order the ranks as TP, PP, DP instead of TP, DP, PP"),
        off_switch(
            "--disable-gloo-process-groups", "enable_gloo_process_groups", "no gloo groups beside the device's own"
        ),
    ],
)

_SCHEDULE = in_group(
    "Megatron: learning rate schedule",
    [
        flag(
            "--lr-decay-style",
            str,
            "constant",
            "shape of the decay",
            choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
        ),
        flag("--lr-decay-iters", positive_int, None, "optimiser steps of the decay; unset: all"),
        flag("--lr-warmup-iters", int, 0, "optimiser steps of the warm-up"),
        flag("--lr-warmup-fraction", float, None, "the same as a fraction of the decay"),
        flag("--lr-warmup-init", float, 0.0, "learning rate at the start of the warm-up"),
        flag(
            "--lr-wsd-decay-style",
            str,
            "exponential",
            "end of a WSD schedule",
            choices=("exponential", "linear", "cosine", "minus_sqrt"),
        ),
        flag("--lr-wsd-decay-iters", positive_int, None, "optimiser steps of that end"),
        flag("--start-weight-decay", float, None, "weight decay at the start; unset: --weight-decay"),
        flag("--end-weight-decay", float, None, "weight decay at the end; unset: --weight-decay"),
        flag(
            "--weight-decay-incr-style",
            str,
            "constant",
            "how weight decay changes",
            choices=("constant", "linear", "cosine"),
        ),
        switch("--override-opt-param-scheduler", "take the schedule's settings from here, not from the checkpoint"),
        switch("--use-checkpoint-opt-param-scheduler", "take the schedule's settings from the checkpoint"),
    ],
)

_CHECKPOINT = in_group(
    "Megatron: checkpoint format",
    [
        flag("--ckpt-format", str, "torch_dist", "format of checkpoints", choices=("torch_dist",)),
        off_switch(
            "--no-ckpt-fully-parallel-save", "ckpt_fully_parallel_save", "let one data-parallel rank write everything"
        ),
        switch("--ckpt-fully-parallel-load", "share the reading among data-parallel ranks", default=True),
        switch("--ckpt-assume-constant-structure", "reuse the plan of the first save", default=True),
        switch(
            "--use-persistent-ckpt-worker",
            "Megatron's background writer process",
            default=None,
            pending="--async-save writes from threads of the trainer, which need no process to be kept",
        ),
        flag(
            "--dist-ckpt-strictness",
            str,
            "assume_ok_unexpected",
            "what a key mismatch at load does",
            choices=(
                "assume_ok_unexpected",
                "log_unexpected",
                "log_all",
                "raise_unexpected",
                "raise_all",
                "ignore_all",
            ),
        ),
        switch("--exit-on-missing-checkpoint", "an error where --load has no checkpoint, even if it is also --save"),
    ],
)

FLAGS = [*_ARCHITECTURE, *_TRAINING, *_SCHEDULE, *_CHECKPOINT]
