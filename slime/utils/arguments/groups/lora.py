"""Low-rank adapters: training a small part beside frozen weights."""

from __future__ import annotations

from slime.utils.arguments.flag import flag, in_group, positive_int

ALL_LINEAR, EXPERTS = "all-linear", "experts"
# from the second line on: of fused MLPs (GLM-4), multi-latent attention (DeepSeek), gated delta nets (Qwen3-Next, 3.5)
HF_TARGETS = (
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    "gate_up_proj", "q_b_proj", "kv_b_proj",
    "in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj",
)  # fmt: skip
MEGATRON_TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "in_proj")

FLAGS = in_group(
    "LoRA",
    [
        flag(
            "--lora-rank",
            positive_int,
            None,
            "train adapters of this rank, beside the frozen weights of --hf-checkpoint",
        ),
        flag("--lora-alpha", float, None, "adapters are scaled by alpha / rank; unset: twice the rank"),
        flag(
            "--lora-targets",
            str,
            None,
            "linear layers that get an adapter, by their Hugging Face or Megatron names; all-linear: all but "
            "embeddings, output layer and routers; experts: all of the routed experts; unset: all-linear",
            nargs="+",
            choices=(ALL_LINEAR, EXPERTS, *HF_TARGETS, *MEGATRON_TARGETS),
        ),
        flag("--lora-load", str, None, "PEFT adapter folder to start from where --load has no checkpoint"),
        flag(
            "--lora-save-adapter",
            str,
            None,
            "also export the adapter in PEFT's format there at each save; {rollout_id} is filled in",
        ),
    ],
)
