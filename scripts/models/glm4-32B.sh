# Architecture flags of GLM-4-32B-0414.
MODEL_ARGS=(
    --num-layers 61
    --hidden-size 6144
    --ffn-hidden-size 23040
    --num-attention-heads 48
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --vocab-size 151552
    --swiglu
    --disable-bias-linear
    --normalization RMSNorm
    --post-self-attn-layernorm
    --post-mlp-layernorm
    --norm-epsilon 1e-5
    --use-rotary-position-embeddings
    --rotary-base 10000
    --rotary-percent 0.5
    --rotary-interleaved
    --no-rope-fusion
    --untie-embeddings-and-output-weights
)
