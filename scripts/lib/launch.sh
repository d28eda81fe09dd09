# shellcheck shell=bash
# What all scripts/run-*.sh share. A script sources this file, calls `use_model NAME`, changes the arrays of flags that
# it wants otherwise, and ends with `launch "$@"`; what its user adds on the command line wins over the arrays.
#
#   HF_CHECKPOINT    the model's Hugging Face folder               (models/<name>)
#   PROMPT_DATA      training prompts, .jsonl with prompt, label   (data/dapo-math-17k.jsonl)
#   EVAL_DATA        evaluation prompts of the same form           (data/aime-2024.jsonl; empty: no evaluation)
#   SAVE_DIR         checkpoints; a run goes on from what is there (outputs/<name>)
#   NUM_NODES, GPUS_PER_NODE                                       (as the script says)
#   RAY_ADDRESS      a running cluster to join; http://... submits a Ray job to it. Unset: the cluster on this machine,
#                    or one that lives as long as the run. Several nodes: `ray start` on each of them first.
#   WANDB_PROJECT    log to Weights & Biases under this project

SLIME_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

# use_model NAME: architecture flags of scripts/models/NAME.sh, and the flags that runs have in common.
use_model() {
    local name=$1
    # shellcheck disable=SC1090
    source "$SLIME_ROOT/scripts/models/$name.sh"
    HF_CHECKPOINT=${HF_CHECKPOINT:-$SLIME_ROOT/models/$name}
    PROMPT_DATA=${PROMPT_DATA:-$SLIME_ROOT/data/dapo-math-17k.jsonl}
    EVAL_DATA=${EVAL_DATA-$SLIME_ROOT/data/aime-2024.jsonl}
    SAVE_DIR=${SAVE_DIR:-$SLIME_ROOT/outputs/$name}
    NUM_NODES=${NUM_NODES:-1}
    GPUS_PER_NODE=${GPUS_PER_NODE:-8}

    CKPT_ARGS=(--hf-checkpoint "$HF_CHECKPOINT" --load "$SAVE_DIR" --save "$SAVE_DIR" --save-interval 20)
    ROLLOUT_ARGS=(
        --prompt-data "$PROMPT_DATA"
        --input-key prompt
        --label-key label
        --apply-chat-template
        --rollout-shuffle
        --rm-type deepscaler
        --num-rollout 3000
        --rollout-batch-size 32
        --n-samples-per-prompt 8
        --num-steps-per-rollout 1
        --rollout-max-response-len 8192
        --rollout-temperature 1
        --balance-data
    )
    EVAL_ARGS=()
    if [ -n "$EVAL_DATA" ]; then
        EVAL_ARGS=(
            --eval-interval 20
            --eval-prompt-data aime "$EVAL_DATA"
            --n-samples-per-eval-prompt 16
            --eval-max-response-len 16384
            --eval-top-p 1
        )
    fi
    ALGORITHM_ARGS=(
        --advantage-estimator grpo
        --use-kl-loss
        --kl-loss-coef 0
        --kl-loss-type low_var_kl
        --entropy-coef 0
        --eps-clip 0.2
        --eps-clip-high 0.28
    )
    OPTIMIZER_ARGS=(
        --optimizer adam
        --lr 1e-6
        --lr-decay-style constant
        --weight-decay 0.1
        --adam-beta1 0.9
        --adam-beta2 0.98
    )
    PARALLEL_ARGS=(--tensor-model-parallel-size 1)
    MEMORY_ARGS=(
        --use-dynamic-batch-size
        --max-tokens-per-gpu 9216
        --recompute-granularity full
        --recompute-method uniform
        --recompute-num-layers 1
    )
    SGLANG_ARGS=(--rollout-num-gpus-per-engine 1 --sglang-mem-fraction-static 0.7)
    WANDB_ARGS=()
    if [ -n "${WANDB_PROJECT:-}" ]; then
        WANDB_ARGS=(--use-wandb --wandb-mode online --wandb-project "$WANDB_PROJECT" --wandb-group "$name")
    fi
    MISC_ARGS=(
        --attention-dropout 0
        --hidden-dropout 0
        --accumulate-allreduce-grads-in-fp32
        --attention-softmax-in-fp32
    )
}

# launch [FLAG ...]: run train.py here, or as a Ray job.
launch() {
    if [ -z "${VIRTUAL_ENV:-}" ] && [ -f "$SLIME_ROOT/.venv/bin/activate" ]; then
        # shellcheck disable=SC1091
        source "$SLIME_ROOT/.venv/bin/activate"
    fi
    local command=(
        python "$SLIME_ROOT/train.py"
        --actor-num-nodes "$NUM_NODES"
        --actor-num-gpus-per-node "$GPUS_PER_NODE"
        --num-gpus-per-node "$GPUS_PER_NODE"
        --colocate
        "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" "${ALGORITHM_ARGS[@]}"
        "${OPTIMIZER_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${MEMORY_ARGS[@]}" "${SGLANG_ARGS[@]}" "${WANDB_ARGS[@]}"
        "${MISC_ARGS[@]}" "$@"
    )
    case "${RAY_ADDRESS:-}" in
        http://* | https://*) exec ray job submit -- "${command[@]}" ;;
        *) exec "${command[@]}" ;;
    esac
}
