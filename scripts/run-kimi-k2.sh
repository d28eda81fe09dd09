#!/usr/bin/env bash
# GRPO on math prompts with Kimi-K2, colocated on 32 nodes of 8 GPUs. Settings: see lib/launch.sh.
# The optimiser's state lives in host memory.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/launch.sh"
NUM_NODES=${NUM_NODES:-32}
use_model kimi-k2
PARALLEL_ARGS=(
    --tensor-model-parallel-size 8
    --sequence-parallel
    --pipeline-model-parallel-size 8
    --decoder-last-pipeline-num-layers 5
    --context-parallel-size 4
    --expert-model-parallel-size 32
    --expert-tensor-parallel-size 1
)
SGLANG_ARGS=(--rollout-num-gpus-per-engine 64 --sglang-mem-fraction-static 0.7)
MEMORY_ARGS+=(--max-tokens-per-gpu 16384)
OPTIMIZER_ARGS+=(--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer)
SGLANG_ARGS+=(--sglang-ep-size 64)
launch "$@"
