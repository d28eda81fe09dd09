# Architecture flags of Qwen3.5-27B's text model: three of four layers are gated delta nets.
MODEL_ARGS=(
    --num-layers 64
    --hidden-size 5120
    --ffn-hidden-size 17408
    --num-attention-heads 24
    --group-query-attention
    --num-query-groups 4
    --kv-channels 256
    --vocab-size 248320
    --swiglu
    --disable-bias-linear
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --use-rotary-position-embeddings
    --rotary-base 10000000
    --untie-embeddings-and-output-weights
    --qk-layernorm
    --rotary-percent 0.25
    --apply-layernorm-1p
    --attention-output-gate
    --experimental-attention-variant gated_delta_net
    --linear-attention-freq 4
    --linear-num-key-heads 16
    --linear-num-value-heads 48
    --linear-key-head-dim 128
    --linear-value-head-dim 128
    --linear-conv-kernel-dim 4
)
