# Architecture flags of Kimi-K2-Thinking: those of Kimi-K2 with a longer context.
# shellcheck disable=SC1091
source "$(dirname "${BASH_SOURCE[0]}")/kimi-k2.sh"
MODEL_ARGS+=(--rotary-scaling-factor 64) # the last one counts
