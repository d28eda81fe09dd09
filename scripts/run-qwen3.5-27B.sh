#!/usr/bin/env bash
# GRPO on math prompts with Qwen3.5-27B, colocated on two nodes of 8 GPUs. Settings: see lib/launch.sh.
# The vision tower stays as it is.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/launch.sh"
NUM_NODES=${NUM_NODES:-2}
use_model qwen3.5-27B
PARALLEL_ARGS=(
    --tensor-model-parallel-size 4
    --sequence-parallel
    --pipeline-model-parallel-size 2
)
SGLANG_ARGS=(--rollout-num-gpus-per-engine 4 --sglang-mem-fraction-static 0.7)
MEMORY_ARGS+=(--max-tokens-per-gpu 9216)
launch "$@"
