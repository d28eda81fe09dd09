#!/usr/bin/env bash
# GRPO on math prompts with Llama-3.2-3B-Instruct, colocated on one node of 8 GPUs. Settings: see lib/launch.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/launch.sh"
use_model llama3.2-3B-Instruct
PARALLEL_ARGS=(--tensor-model-parallel-size 2 --sequence-parallel)
launch "$@"
