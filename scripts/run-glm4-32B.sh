#!/usr/bin/env bash
# GRPO on math prompts with GLM-4-32B, colocated on two nodes of 8 GPUs. Settings: see lib/launch.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/launch.sh"
NUM_NODES=${NUM_NODES:-2}
use_model glm4-32B
PARALLEL_ARGS=(
    --tensor-model-parallel-size 8
    --sequence-parallel
)
SGLANG_ARGS=(--rollout-num-gpus-per-engine 4 --sglang-mem-fraction-static 0.7)
launch "$@"
