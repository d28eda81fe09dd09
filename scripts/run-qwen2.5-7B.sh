#!/usr/bin/env bash
# GRPO on math prompts with Qwen2.5-7B, colocated on one node of 8 GPUs. Settings: see lib/launch.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/launch.sh"
use_model qwen2.5-7B
PARALLEL_ARGS=(--tensor-model-parallel-size 2 --sequence-parallel)
SGLANG_ARGS=(--rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.7)
launch "$@"
