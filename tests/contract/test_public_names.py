"""Names that scripts and plug-ins import or replace stay where they are, and import no more than they need."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest

PUBLIC_NAMES = {
    "slime.utils.misc": ["load_function", "SingletonMeta"],
    "slime.utils.types": ["Sample"],
    "slime.rollout.base_types": ["RolloutFnTrainOutput", "RolloutFnEvalOutput", "call_rollout_fn"],
    "slime.rollout.sglang_rollout": [
        "GenerateState",
        "abort",
        "eval_rollout",
        "generate",
        "generate_and_rm",
        "generate_and_rm_group",
        "generate_rollout",
        "get_model_url",
    ],
    "slime.rollout.sft_rollout": ["generate_rollout"],
    "slime.rollout.data_source": ["DataSource", "RolloutDataSource", "RolloutDataSourceWithBuffer", "pop_first"],
    "slime.rollout.filter_hub.base_types": [
        "DynamicFilterOutput",
        "MetricGatherer",
        "call_dynamic_filter",
        "should_drop_dynamic_filter_output",
    ],
    "slime.rollout.filter_hub.dynamic_sampling_filters": ["check_reward_nonzero_std"],
    "slime.rollout.sample_hooks": ["apply_rollout_sample_hooks", "set_current_rollout_id"],
    "slime.rollout.rm_hub": ["async_rm", "batched_async_rm"],
    "slime.utils.mask_utils": ["MultiTurnLossMaskGenerator"],
    "slime.utils.http_utils": ["get", "post"],
    "slime.utils.eval_config": ["build_eval_dataset_configs"],
    "slime.utils.arguments": ["parse_args", "parse_megatron_role_args", "slime_validate_args"],
    "slime.backends.sglang_utils.sglang_config": ["ModelConfig", "ServerGroupConfig", "SglangConfig"],
    "slime.backends.sglang_utils.external": [
        "ExternalEngineInfo",
        "discover_external_engines",
        "external_engine_infos_from_args",
        "get_server_info",
        "normalize_external_engine_addr",
    ],
    "slime.router.client": ["fill_sample"],
    "slime.utils.ppo_utils": ["compute_approx_kl", "compute_policy_loss"],
    "slime.utils.dp_schedule": ["build_dp_schedule"],
    "slime.utils.seqlen_balancing": ["get_seqlen_balanced_partitions"],
    "slime.utils.data": ["Dataset"],
    "slime.utils.common": ["is_npu"],
    "slime.backends.megatron_utils.loss": ["compute_advantages_and_returns", "loss_function"],
    "slime.backends.megatron_utils.cp_utils": ["get_sum_of_sample_mean"],
    "slime.backends.megatron_utils.data": ["get_batch"],
    "slime.observability.trace_utils": ["bind_trace", "trace_event", "trace_function", "trace_span"],
    "slime.observability.logging_utils": ["configure_logger", "finish_tracking", "init_tracking", "log"],
}

# Modules of which the top-level import needs torch; no other may load it.
NEEDS_TORCH = {
    "slime.utils.ppo_utils",
    "slime.backends.megatron_utils.loss",
    "slime.backends.megatron_utils.cp_utils",
    "slime.backends.megatron_utils.data",
}
HEAVY = ("torch", "megatron", "sglang", "transformers", "wandb")
SAMPLE_FIELDS = {
    "group_index", "index", "rollout_id", "prompt", "tokens", "multimodal_inputs", "multimodal_train_inputs",
    "apply_chat_template_kwargs", "response", "response_length", "label", "reward", "loss_mask", "weight_versions",
    "rollout_log_probs", "rollout_top_p_token_ids", "rollout_top_p_token_offsets", "rollout_routed_experts",
    "remove_sample", "teacher_log_probs", "status", "metadata", "generate_function_path", "custom_rm_path",
    "train_metadata", "session_id", "non_generation_time", "spec_info", "prefix_cache_info",
}  # fmt: skip

# One process imports module after module and reports what each added: a process per module would take minutes.
IMPORT_EACH = """
import importlib, json, sys
heavy = {heavy!r}
for module in {modules!r}:
    before = set(sys.modules)
    importlib.import_module(module)
    print(json.dumps([module, sorted({{name for name in set(sys.modules) - before if name in heavy}})]))
"""


@pytest.mark.parametrize("module", sorted(PUBLIC_NAMES))
def test_names_are_there(module: str) -> None:
    imported = importlib.import_module(module)
    missing = [name for name in PUBLIC_NAMES[module] if not hasattr(imported, name)]
    assert not missing, f"{module} lacks {missing}"


def test_imports_stay_light() -> None:
    """No module needs Megatron, SGLang or transformers to be imported, and torch only where tensors are computed."""
    light_first = sorted(PUBLIC_NAMES, key=lambda module: (module in NEEDS_TORCH, module))
    code = IMPORT_EACH.format(modules=light_first, heavy=HEAVY)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    loaded = dict(json.loads(line) for line in run.stdout.splitlines())
    too_heavy = {
        module: names
        for module, names in loaded.items()
        if set(names) - ({"torch"} if module in NEEDS_TORCH else set())
    }
    assert not too_heavy


def test_sample_has_every_field_and_method() -> None:
    from slime.utils.types import Sample

    assert set(vars(Sample())) >= SAMPLE_FIELDS
    for method in ("to_dict", "from_dict", "append_response_tokens", "get_reward_value"):
        assert callable(getattr(Sample, method))
    assert {status.value for status in Sample.Status} == {"pending", "completed", "truncated", "aborted", "failed"}
