#!/usr/bin/env bash
# GRPO on math prompts with MiMo-7B-RL, colocated on one node of 8 GPUs. Settings: see lib/launch.sh.
# The layer that predicts ahead learns to follow the policy.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/launch.sh"
use_model mimo-7B-rl
PARALLEL_ARGS=(--tensor-model-parallel-size 2 --sequence-parallel)
SGLANG_ARGS=(--rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.7)
MEMORY_ARGS+=(--max-tokens-per-gpu 9216)
ALGORITHM_ARGS+=(--enable-mtp-training --mtp-loss-scaling-factor 0.2)
launch "$@"
