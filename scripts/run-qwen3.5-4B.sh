#!/usr/bin/env bash
# GRPO on math prompts with Qwen3.5-4B, colocated on one node of 8 GPUs. Settings: see lib/launch.sh.
# The vision tower stays as it is.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/launch.sh"
use_model qwen3.5-4B
PARALLEL_ARGS=(--tensor-model-parallel-size 2 --sequence-parallel)
SGLANG_ARGS=(--rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.7)
MEMORY_ARGS+=(--max-tokens-per-gpu 9216)
launch "$@"
