# Architecture flags of DeepSeek-V3 and R1: latent attention, 61 layers, all but the first three of 256 experts, 8 of them
# per token out of 4 of 8 groups.
# MODEL_ARGS_NUM_LAYERS: a cut model has fewer (5, 20), in its config.json too.
MODEL_ARGS_NUM_LAYERS=${MODEL_ARGS_NUM_LAYERS:-61}
MODEL_ARGS=(
    --num-layers "$MODEL_ARGS_NUM_LAYERS"
    --hidden-size 7168
    --ffn-hidden-size 18432
    --num-attention-heads 128
    --multi-latent-attention
    --q-lora-rank 1536
    --kv-lora-rank 512
    --qk-head-dim 128
    --qk-pos-emb-head-dim 64
    --v-head-dim 128
    --vocab-size 129280
    --swiglu
    --disable-bias-linear
    --normalization RMSNorm
    --qk-layernorm
    --norm-epsilon 1e-6
    --use-rotary-position-embeddings
    --rotary-base 10000
    --rope-type yarn
    --rotary-scaling-factor 40
    --original-max-position-embeddings 4096
    --mscale 1.0
    --mscale-all-dim 1.0
    --beta-fast 32
    --beta-slow 1
    --untie-embeddings-and-output-weights
    --num-experts 256
    --moe-router-topk 8
    --moe-ffn-hidden-size 2048
    --moe-shared-expert-intermediate-size 2048
    --moe-layer-freq "([0]*3+[1]*$((MODEL_ARGS_NUM_LAYERS - 3)))"
    --moe-router-score-function sigmoid
    --moe-router-enable-expert-bias
    --moe-router-bias-update-rate 0
    --moe-router-topk-scaling-factor 2.5
    --moe-router-num-groups 8
    --moe-router-group-topk 4
    --moe-router-dtype fp32
    --moe-router-load-balancing-type none
    --moe-aux-loss-coeff 0
    --moe-token-dispatcher-type alltoall
    --moe-grouped-gemm
    --moe-permute-fusion
)
