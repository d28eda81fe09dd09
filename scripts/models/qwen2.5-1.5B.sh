# Architecture flags of Qwen2.5-1.5B.
# MODEL_ARGS_ROTARY_BASE: 10000 for Qwen2.5-Math-1.5B.
MODEL_ARGS=(
    --num-layers 28
    --hidden-size 1536
    --ffn-hidden-size 8960
    --num-attention-heads 12
    --group-query-attention
    --num-query-groups 2
    --kv-channels 128
    --vocab-size 151936
    --swiglu
    --disable-bias-linear
    --add-qkv-bias
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --use-rotary-position-embeddings
    --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
)
