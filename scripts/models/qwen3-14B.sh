# Architecture flags of Qwen3-14B.
MODEL_ARGS=(
    --num-layers 40
    --hidden-size 5120
    --ffn-hidden-size 17408
    --num-attention-heads 40
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
    --rotary-base 1000000
    --untie-embeddings-and-output-weights
)
