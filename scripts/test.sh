#!/usr/bin/env bash
# Sets up, checks style and types, and runs the tests. Arguments go to pytest: scripts/test.sh tests/unit -k dataset
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh
if [ -z "${VIRTUAL_ENV:-}" ]; then
    # shellcheck disable=SC1091
    . .venv/bin/activate
fi
# Threads that wait without spinning: several processes share the cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}"
export HF_HUB_OFFLINE=1 WANDB_MODE="${WANDB_MODE:-offline}"
if [ $# -eq 0 ]; then
    ruff check .
    ruff format --check .
    mypy
fi
exec python -m pytest "$@"
