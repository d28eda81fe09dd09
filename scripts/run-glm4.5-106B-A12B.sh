#!/usr/bin/env bash
# GRPO on math prompts with GLM-4.5-Air, colocated on eight nodes of 8 GPUs. Settings: see lib/launch.sh.
# The optimiser's state lives in host memory.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/launch.sh"
NUM_NODES=${NUM_NODES:-8}
use_model glm4.5-106B-A12B
PARALLEL_ARGS=(
    --tensor-model-parallel-size 8
    --sequence-parallel
    --pipeline-model-parallel-size 2
    --context-parallel-size 2
    --expert-model-parallel-size 16
    --expert-tensor-parallel-size 1
)
SGLANG_ARGS=(--rollout-num-gpus-per-engine 8 --sglang-mem-fraction-static 0.7)
MEMORY_ARGS+=(--max-tokens-per-gpu 16384)
OPTIMIZER_ARGS+=(--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer)
SGLANG_ARGS+=(--sglang-ep-size 8)
launch "$@"
