#!/usr/bin/env bash
# The main job, end to end, on this machine: a tiny Qwen3 learns to solve sums with GRPO.
#   bash scripts/quickstart.sh [OUTPUT_DIR]      (default: outputs/quickstart; it is made anew)
# SEED=n draws other problems, weights and samples.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh
if [ -z "${VIRTUAL_ENV:-}" ]; then
    # shellcheck disable=SC1091
    . .venv/bin/activate
fi
# Threads that wait without spinning: trainer and engine share the cores. The models are local.
export OMP_WAIT_POLICY=PASSIVE HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# torchvision is there for transformers; that it cannot read images without a CUDA build does not matter here.
export PYTHONWARNINGS="ignore::UserWarning:torchvision.io.image"

SEED=${SEED:-42}
OUT=${1:-outputs/quickstart}
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
STARTED=$SECONDS

say() { printf '\n== %s\n' "$*"; }

# Only what an earlier run of this script has made there is removed.
rm -rf "$OUT"/{model,data,sft,sft-log,sft-hf,grpo,grpo-log,grpo-hf,reward.png,command.txt}

say "a tiny Qwen3 model with its tokenizer, and sums by reasoning-gym"
python tools/make_tiny_model.py --output-dir "$OUT/model" --seed "$SEED"
python examples/quickstart/make_data.py --output-dir "$OUT/data" --seed "$SEED"

MODEL_ARGS=(--actor-num-nodes 1 --actor-num-gpus-per-node 1)
BATCH_ARGS=(--use-dynamic-batch-size --max-tokens-per-gpu 4096 --rollout-max-response-len 8)
OPTIMIZER_ARGS=(--adam-beta2 0.95 --weight-decay 0.0)

say "supervised warm start: demonstrations that answer at first, and then mostly give up"
python train.py "${MODEL_ARGS[@]}" "${BATCH_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" \
    --debug-train-only \
    --hf-checkpoint "$OUT/model" \
    --rollout-function-path slime.rollout.sft_rollout.generate_rollout \
    --loss-type sft_loss --calculate-per-token-loss --disable-compute-advantages-and-returns \
    --prompt-data "$OUT/data/sft.jsonl" --input-key messages \
    --num-rollout 60 --rollout-batch-size 640 --global-batch-size 32 \
    --lr 3e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 20 \
    --seed "$SEED" --rollout-seed "$SEED" \
    --save "$OUT/sft" --save-interval 60 --save-hf "$OUT/sft-hf" --log-dir "$OUT/sft-log"

COMMAND=(python train.py "${MODEL_ARGS[@]}" "${BATCH_ARGS[@]}" "${OPTIMIZER_ARGS[@]}"
    --colocate
    --hf-checkpoint "$OUT/sft-hf" --ref-load "$OUT/sft-hf"
    --prompt-data "$OUT/data/train.jsonl" --input-key prompt --label-key label
    --apply-chat-template --rollout-shuffle
    --rm-type reasoning_gym
    --num-rollout 30 --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 128
    --rollout-temperature 1.0
    --advantage-estimator grpo --use-kl-loss --kl-loss-type low_var_kl --kl-loss-coef 0.01
    --lr 2e-4 --lr-decay-style constant
    --eval-prompt-data heldout "$OUT/data/eval.jsonl" --eval-interval 5
    --seed "$SEED" --rollout-seed "$SEED" --sglang-enable-deterministic-inference
    --save "$OUT/grpo" --save-interval 10 --save-hf "$OUT/grpo-hf/{rollout_id}" --log-dir "$OUT/grpo-log")
printf '%q ' "${COMMAND[@]}" >"$OUT/command.txt"

say "GRPO: trainer and engine share this machine"
"${COMMAND[@]}"

say "done in $((SECONDS - STARTED)) s"
status=0
python examples/quickstart/report.py --log-dir "$OUT/grpo-log" --output-dir "$OUT" || status=$?
printf 'The model: %s (Hugging Face format), %s (checkpoint to resume from).\nThe GRPO command: %s\n' \
    "$OUT/grpo-hf/29" "$OUT/grpo" "$OUT/command.txt"
cat "$OUT/command.txt"
echo
exit "$status"
