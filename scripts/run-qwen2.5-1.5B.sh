#!/usr/bin/env bash
# GRPO on math prompts with Qwen2.5-1.5B, colocated on one node of 8 GPUs. Settings: see lib/launch.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/launch.sh"
use_model qwen2.5-1.5B
PARALLEL_ARGS=(--tensor-model-parallel-size 1)
MEMORY_ARGS+=(--max-tokens-per-gpu 16384)
launch "$@"
