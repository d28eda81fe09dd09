# Architecture flags of Qwen2.5-3B.
MODEL_ARGS=(
    --num-layers 36
    --hidden-size 2048
    --ffn-hidden-size 11008
    --num-attention-heads 16
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
    --rotary-base 1000000
)
