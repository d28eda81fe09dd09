#!/usr/bin/env bash
# GRPO on math prompts with GLM-4-9B, colocated on one node of 8 GPUs. Settings: see lib/launch.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/launch.sh"
use_model glm4-9B
PARALLEL_ARGS=(
    --tensor-model-parallel-size 2
    --sequence-parallel
    --context-parallel-size 2
)
SGLANG_ARGS=(--rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.7)
MEMORY_ARGS+=(--max-tokens-per-gpu 4608)
launch "$@"
