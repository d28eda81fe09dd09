"""Arguments of the rollout side, made by hand for unit tests."""

from __future__ import annotations

from argparse import Namespace
from typing import Any


def rollout_args(**given: Any) -> Namespace:
    """Two answers per prompt, batches of two prompts, everything optional off."""
    defaults: dict[str, Any] = {
        "hf_checkpoint": None,
        "prompt_data": None,
        "debug_train_only": False,
        "rollout_global_dataset": True,
        "rollout_max_prompt_len": None,
        "rollout_max_context_len": None,
        "rollout_max_response_len": 8,
        "rollout_temperature": 1.0,
        "rollout_top_p": 1.0,
        "rollout_top_k": -1,
        "rollout_stop": None,
        "rollout_stop_token_ids": None,
        "rollout_skip_special_tokens": False,
        "rollout_seed": 42,
        "rollout_shuffle": False,
        "rollout_batch_size": 2,
        "over_sampling_batch_size": 2,
        "n_samples_per_prompt": 2,
        "rollout_num_gpus": 1,
        "rollout_num_gpus_per_engine": 1,
        "sglang_server_concurrency": 64,
        "sglang_router_ip": "127.0.0.1",
        "sglang_router_port": 0,
        "vocab_size": 256,
        "input_key": "input",
        "label_key": None,
        "tool_key": None,
        "metadata_key": "metadata",
        "multimodal_keys": None,
        "apply_chat_template": False,
        "apply_chat_template_kwargs": {},
        "buffer_filter_path": None,
        "dynamic_sampling_max_drops": 50,
        "load_forge_rollout_data": None,
        "max_staleness": None,
        "offload_rollout": False,
        "partial_rollout": False,
        "mask_offpolicy_in_partial_rollout": False,
        "custom_generate_function_path": None,
        "rollout_sample_hook_path": [],
        "dynamic_sampling_filter_path": None,
        "rollout_sample_filter_path": None,
        "rollout_all_samples_process_path": None,
        "custom_rm_path": None,
        "custom_reward_post_process_path": None,
        "custom_convert_samples_to_train_data_path": None,
        "rm_type": None,
        "rm_url": None,
        "rm_timeout": 10.0,
        "group_rm": False,
        "reward_key": None,
        "eval_reward_key": None,
        "advantage_estimator": "grpo",
        "rewards_normalization": True,
        "grpo_std_normalization": False,
        "loss_mask_type": "qwen",
        "eval_datasets": None,
        "eval_config": None,
        "eval_prompt_data": None,
        "eval_max_prompt_len": None,
        "eval_max_context_len": None,
        "n_samples_per_eval_prompt": 1,
        "run_id": "rollout-unit",
        "save": None,
        "load": None,
    }
    unknown = given.keys() - defaults.keys() - {"global_batch_size", "micro_batch_size", "router_policy"}
    extra = {"sglang_enable_deterministic_inference", "use_rollout_routing_replay"}
    assert unknown <= extra, f"not known to the rollout: {unknown - extra}"
    return Namespace(**{**defaults, **given})
