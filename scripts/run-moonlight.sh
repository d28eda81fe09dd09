#!/usr/bin/env bash
# GRPO on math prompts with Moonlight-16B-A3B, colocated on one node of 8 GPUs. Settings: see lib/launch.sh.
# The optimiser's state lives in host memory.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/launch.sh"
use_model moonlight
PARALLEL_ARGS=(
    --tensor-model-parallel-size 4
    --sequence-parallel
    --expert-model-parallel-size 8
    --expert-tensor-parallel-size 1
)
SGLANG_ARGS=(--rollout-num-gpus-per-engine 4 --sglang-mem-fraction-static 0.7)
MEMORY_ARGS+=(--max-tokens-per-gpu 20480)
OPTIMIZER_ARGS+=(--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer)
SGLANG_ARGS+=(--sglang-ep-size 4)
launch "$@"
