#!/usr/bin/env bash
# GRPO on math prompts with Llama-3.1-8B-Instruct, colocated on one node of 8 GPUs. Settings: see lib/launch.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/launch.sh"
use_model llama3.1-8B-Instruct
PARALLEL_ARGS=(--tensor-model-parallel-size 2 --sequence-parallel)
SGLANG_ARGS=(--rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.7)
launch "$@"
