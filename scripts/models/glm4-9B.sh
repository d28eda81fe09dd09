# Architecture flags of GLM-4-9B-0414.
MODEL_ARGS=(
    --num-layers 40
    --hidden-size 4096
    --ffn-hidden-size 13696
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 2
    --kv-channels 128
    --vocab-size 151552
    --swiglu
    --disable-bias-linear
    --normalization RMSNorm
    --add-qkv-bias
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
