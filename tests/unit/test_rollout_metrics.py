"""Metrics of rollouts and evaluations."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime.observability import logging_utils
from slime.observability.rollout_metrics import (
    compute_metrics_from_samples,
    compute_perf_metrics_from_samples,
    log_eval_rollout_data,
    log_rollout_data,
)
from slime.observability.trace_utils import build_sglang_meta_trace_attrs, trace_span
from slime.utils.types import Sample


def make_args(**given: Any) -> Namespace:
    defaults = {
        "reward_key": None,
        "advantage_estimator": "grpo",
        "rollout_num_gpus": 2,
        "n_samples_per_eval_prompt": 1,
        "run_id": "unit",
    }
    return Namespace(**{**defaults, **given})


def make_sample(group: int | None, reward: Any, **given: Any) -> Sample:
    fields = {"response_length": 4, "tokens": [0] * 4, "status": Sample.Status.COMPLETED, **given}
    return Sample(group_index=group, reward=reward, **fields)


def logged(args: Namespace) -> list[dict[str, Any]]:
    logging_utils.finish_tracking(args)
    return [json.loads(line) for line in Path(args.log_dir, "metrics.jsonl").read_text().splitlines()]


def test_lengths_count_trained_tokens() -> None:
    samples = [make_sample(0, 1.0, loss_mask=[1, 1, 0, 0]), make_sample(0, 0.0)]
    metrics = compute_metrics_from_samples(make_args(), samples)
    assert {key: metrics[f"response_len/{key}"] for key in ("mean", "max", "min")} == {"mean": 3, "max": 4, "min": 2}


def test_truncated_ratio() -> None:
    """M14: an answer that ran into its limit counts as truncated."""
    samples = [make_sample(0, 1.0, status=Sample.Status.TRUNCATED), make_sample(0, 0.0)]
    assert compute_metrics_from_samples(make_args(), samples)["truncated_ratio"] == 0.5


def test_groups_without_contrast_are_counted_by_reward() -> None:
    """L6: 0.1 in float32 has a tiny spread and is still one reward."""
    import numpy as np

    float32 = [float(np.float32(0.1)), 0.1]
    samples = [make_sample(0, r) for r in float32] + [make_sample(1, r) for r in (1.0, 0.0)]
    samples += [make_sample(2, 0.0), make_sample(2, -0.0)]
    metrics = compute_metrics_from_samples(make_args(), samples)
    counts = {key: value for key, value in metrics.items() if key.startswith("zero_std/")}
    assert counts == {"zero_std/count_0.1": 1, "zero_std/count_0": 1}


def test_dict_rewards_need_their_key_here_too() -> None:
    """R9: reward_key picks the value everywhere."""
    samples = [make_sample(0, {"a": 1.0, "kind": "format"}), make_sample(0, {"a": 1.0, "kind": "ok"})]
    args = make_args(reward_key="a", log_reward_category="kind")
    metrics = compute_metrics_from_samples(args, samples)
    assert metrics["zero_std/count_1"] == 1
    assert (metrics["error_cat/format"], metrics["error_cat/ok"]) == (0.5, 0.5)


def test_engine_counters() -> None:
    sample = make_sample(0, 1.0, rollout_top_p_token_offsets=[0, 3, 4, 6, 8])
    sample.spec_info.add({"spec_accept_token_num": 3, "spec_draft_token_num": 4, "spec_verify_ct": 2})
    sample.spec_info.completion_token_num = 5
    sample.prefix_cache_info.add({"cached_tokens": 2, "prompt_tokens": 8})
    metrics = compute_metrics_from_samples(make_args(), [sample])
    assert metrics["spec_accept_rate"] == 0.75 and metrics["spec_accept_length"] == 2.5
    assert metrics["prefix_cache_hit_rate"] == 0.25 and metrics["avg_cached_tokens_per_sample"] == 2
    assert metrics["top_p_kept_vocab_per_token"] == 2


def test_throughput() -> None:
    samples = [
        make_sample(0, 1.0, response_length=10, loss_mask=[1] * 4 + [0] * 6, non_generation_time=1.0),
        make_sample(0, 1.0, response_length=6),
    ]
    metrics = compute_perf_metrics_from_samples(make_args(), samples, rollout_time=2.0)
    assert metrics["tokens_per_gpu_per_sec"] == 16 / 2 / 2
    assert metrics["effective_tokens_per_gpu_per_sec"] == 10 / 2 / 2
    assert metrics["longest_sample_tokens_per_sec"] == 5
    assert metrics["longest_sample_non_generation_time"] == 1.0
    assert metrics["longest_sample_tokens_per_sec_without_non_generation"] == 10
    assert metrics["longest_effective_sample_non_generation_time"] == 0.0
    assert metrics["non_generation_time/max"] == 1.0


@pytest.mark.parametrize("num_gpus", [0, None])
def test_no_engines_no_rate_per_device(num_gpus: int | None) -> None:
    """P6: rollout_num_gpus 0 or None must not divide by zero."""
    metrics = compute_perf_metrics_from_samples(make_args(rollout_num_gpus=num_gpus), [make_sample(0, 1.0)], 2.0)
    assert "tokens_per_gpu_per_sec" not in metrics and metrics["rollout_time"] == 2.0


@pytest.mark.parametrize("span_name", ["sglang_generate", "sglang_generate_streaming"])
def test_request_figures_count_for_every_kind_of_generation(span_name: str) -> None:
    """Surface 9: streaming requests were left out because their span has another name."""
    sample = make_sample(0, 1.0)
    for latency in (1.0, 3.0):
        with trace_span(sample, span_name) as span:
            span.update(build_sglang_meta_trace_attrs({"e2e_latency": latency, "prefill_bootstrap_duration": 0.5}))
    metrics = compute_perf_metrics_from_samples(make_args(), [sample], 2.0)
    assert metrics["request/e2e_latency/mean"] == 2.0 and metrics["request/e2e_latency/max"] == 3.0
    assert metrics["prefill/bootstrap_duration/median"] == 0.5


def test_rollout_is_logged_with_the_functions_own_metrics(tmp_path: Path) -> None:
    args = make_args(log_dir=str(tmp_path), log_passrate=True)
    samples = [make_sample(0, 1.0), make_sample(0, 0.0)]
    log_rollout_data(5, args, samples, {"rollout/dynamic_filter/drop_zero_std": 3}, 2.0)
    (record,) = logged(args)
    assert record["step_key"] == "rollout/step" and record["rollout/step"] == 5
    assert record["rollout/dynamic_filter/drop_zero_std"] == 3
    assert record["perf/rollout_time"] == 2.0 and record["rollout/response_len/mean"] == 4
    assert record["passrate/pass@2"] == 1.0
    assert "rollout/raw_reward" not in record  # the trainer's to report


def test_rollout_only_runs_report_the_reward(tmp_path: Path) -> None:
    args = make_args(log_dir=str(tmp_path), debug_rollout_only=True)
    log_rollout_data(0, args, [make_sample(0, 1.0), make_sample(0, 0.0)], None, 1.0)
    assert logged(args)[0]["rollout/raw_reward"] == 0.5


def test_fan_out_counts_rollouts_not_fragments(tmp_path: Path) -> None:
    """miles #2579: two rollouts of two fragments each are two answers."""
    args = make_args(log_dir=str(tmp_path), log_passrate=True)
    samples = [make_sample(0, reward, rollout_id=r) for r, reward in ((0, 1.0), (0, 1.0), (1, 0.0), (1, 0.0))]
    log_rollout_data(0, args, samples, None, 1.0)
    (record,) = logged(args)
    assert record["passrate/pass@1"] == 0.5 and "passrate/pass@4" not in record


def test_replayed_data_is_not_logged_as_a_rollout(tmp_path: Path) -> None:
    args = make_args(log_dir=str(tmp_path), load_debug_rollout_data="dump_{rollout_id}.pt")
    log_rollout_data(0, args, [make_sample(0, 1.0)], None, 1.0)
    assert not Path(tmp_path, "metrics.jsonl").exists()


def log_and_say_so(rollout_id: int, args: Namespace, samples: Any, extra: Any, seconds: float) -> bool:
    args.seen.append(rollout_id)
    return args.handled


@pytest.mark.parametrize("handled", [True, False])
def test_custom_log_function_replaces_the_default_when_it_says_so(tmp_path: Path, handled: bool) -> None:
    args = make_args(log_dir=str(tmp_path), seen=[], handled=handled)
    args.custom_rollout_log_function_path = f"{__name__}.log_and_say_so"
    log_rollout_data(4, args, [make_sample(0, 1.0)], None, 1.0)
    assert args.seen == [4]
    assert Path(tmp_path, "metrics.jsonl").exists() is not handled
    logging_utils.finish_tracking(args)


def test_eval_uses_each_datasets_own_number_of_answers(tmp_path: Path) -> None:
    """Surface 9 [bug]: pass@k of a dataset follows its own n, not the command line's."""
    datasets = [Namespace(name="a", n_samples_per_eval_prompt=2), Namespace(name="b", n_samples_per_eval_prompt=None)]
    args = make_args(log_dir=str(tmp_path), log_passrate=True, eval_datasets=datasets, n_samples_per_eval_prompt=4)
    data = {
        "a": {"rewards": [1, 0, 0, 0], "truncated": [True, False, False, False]},
        "b": {"rewards": [1, 0, 0, 0], "truncated": [False] * 4, "samples": [make_sample(None, 1.0)] * 4},
    }
    metrics = log_eval_rollout_data(3, args, data, {"eval/extra": 1})
    (record,) = logged(args)
    assert record["eval/step"] == 3 and record["eval/a"] == 0.25 and record["eval/a-truncated_ratio"] == 0.25
    assert record["eval/a-pass@2"] == 0.5 and "eval/a-pass@4" not in record
    assert record["eval/a-mean@2"] == record["eval/b-mean@4"] == 0.25
    assert record["eval/b-pass@4"] == 1.0 and record["eval/b/response_len/mean"] == 4
    assert metrics["eval/extra"] == 1


def test_eval_answers_that_fan_out_count_once(tmp_path: Path) -> None:
    args = make_args(log_dir=str(tmp_path), log_passrate=True, n_samples_per_eval_prompt=2)
    rewards = [1.0, 1.0, 0.0]
    samples = [make_sample(0, r, rollout_id=i) for r, i in zip(rewards, (0, 0, 1), strict=True)]
    metrics = log_eval_rollout_data(0, args, {"a": {"rewards": rewards, "truncated": [], "samples": samples}})
    logging_utils.finish_tracking(args)
    assert metrics["eval/a-pass@1"] == 0.5 and metrics["eval/a-pass@2"] == 1.0


@pytest.mark.parametrize("reward", [None, float("nan"), {"score": 1}, "1"])
def test_eval_reward_that_is_no_number_is_an_error(reward: Any) -> None:
    with pytest.raises(ValueError, match="eval dataset 'aime': reward 1 is not a finite number"):
        log_eval_rollout_data(0, make_args(), {"aime": {"rewards": [1.0, reward]}})
