# Architecture flags of Qwen2.5-32B.
MODEL_ARGS=(
    --num-layers 64
    --hidden-size 5120
    --ffn-hidden-size 27648
    --num-attention-heads 40
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --vocab-size 152064
    --swiglu
    --disable-bias-linear
    --add-qkv-bias
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --use-rotary-position-embeddings
    --rotary-base 1000000
    --untie-embeddings-and-output-weights
)
