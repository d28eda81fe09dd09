#!/usr/bin/env bash
# Asynchronous GRPO on this machine's CPU: a trainer and an engine, each a device of its own.
#   bash examples/async_training/run.sh [OUTPUT_DIR] [flags of train_async.py]
# FULLY_ASYNC=1: generation never stops; weights are sent while requests run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
OUT=${1:-outputs/async}
shift || true
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
export OMP_WAIT_POLICY=PASSIVE HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONPATH="$PWD"
# torchvision is there for transformers; that it cannot read images without a CUDA build does not matter here.
export PYTHONWARNINGS="ignore::UserWarning:torchvision.io.image"

[ -e "$OUT/model/config.json" ] || python tools/make_tiny_model.py --output-dir "$OUT/model"
for i in $(seq 1 256); do printf '{"prompt": "%d+%d="}\n' "$i" "$i"; done >"$OUT/prompts.jsonl"

ROLLOUT_ARGS=()
if [ "${FULLY_ASYNC:-0}" = 1 ]; then
    ROLLOUT_ARGS=(--rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async
        --max-staleness 2)
fi

python train_async.py \
    --hf-checkpoint "$OUT/model" \
    --actor-num-nodes 1 --actor-num-gpus-per-node 1 --rollout-num-gpus 1 \
    --prompt-data "$OUT/prompts.jsonl" --input-key prompt --rollout-shuffle \
    --custom-rm-path examples.async_training.digits.share_of_digits \
    --num-rollout 24 --rollout-batch-size 8 --n-samples-per-prompt 8 --global-batch-size 64 \
    --rollout-max-response-len 24 \
    --use-dynamic-batch-size --max-tokens-per-gpu 4096 \
    --advantage-estimator grpo --lr 1e-3 --lr-decay-style constant \
    --update-weights-interval 1 \
    --save "$OUT/checkpoints" --save-interval 12 --log-dir "$OUT/log" \
    ${ROLLOUT_ARGS[@]+"${ROLLOUT_ARGS[@]}"} "$@"
