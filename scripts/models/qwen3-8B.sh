# Architecture flags of Qwen3-8B.
# MODEL_ARGS_ROTARY_BASE: variants with a longer context have another base (5000000 for the -2507 releases).
MODEL_ARGS=(
    --num-layers 36
    --hidden-size 4096
    --ffn-hidden-size 12288
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --vocab-size 151936
    --swiglu
    --disable-bias-linear
    --qk-layernorm
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --use-rotary-position-embeddings
    --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
    --untie-embeddings-and-output-weights
)
