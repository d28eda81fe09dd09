"""Every metric of a run by name, as data: docs/metrics.md is made from it, and tests hold it against the code."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

STATISTICS = "mean|median|max|min"


@dataclass(frozen=True)
class Metric:
    """One metric or a family of them.

    Attributes:
        name: {stat} stands for mean, median, max or min, {role-} for nothing or "critic-", any other {word} for a
            word of the run (a data set, a reward, a number).
        meaning: what is counted or measured, with its unit.
    """

    name: str
    meaning: str

    def matches(self, name: str) -> bool:
        return _pattern(self.name).fullmatch(name) is not None


@functools.cache
def _pattern(name: str) -> re.Pattern[str]:
    words = {"{stat}": f"(?:{STATISTICS})", "{role-}": "(?:critic-)?"}
    parts = re.split(r"(\{[^}]*\})", name)
    return re.compile("".join(words.get(part, ".+") if part.startswith("{") else re.escape(part) for part in parts))


_SAMPLES = (
    Metric("rollout/response_len/{stat}", "tokens of responses that count for the loss"),
    Metric("rollout/truncated_ratio", "share of samples that hit a length limit"),
    Metric("rollout/repetition_frac", "share of samples whose end is a loop"),
    Metric("rollout/zero_std/count_{reward}", "groups in which every sample got this reward"),
    Metric("rollout/spec_accept_rate", "speculative decoding: accepted share of drafted tokens"),
    Metric("rollout/spec_accept_length", "speculative decoding: tokens per verification"),
    Metric("rollout/prefix_cache_hit_rate", "share of prompt tokens that the engines had cached"),
    Metric("rollout/avg_cached_tokens_per_sample", "cached prompt tokens per sample"),
    Metric("rollout/top_p_kept_vocab_per_token", "ids that nucleus sampling left, per token"),
    Metric("rollout/error_cat/{category}", "share of samples in a category (--log-reward-category)"),
)
_ROLLOUT = (
    *_SAMPLES,
    Metric("rollout/source/{name}/raw_reward", "mean reward of a source (--prompt-data with several files)"),
    Metric("rollout/source/{name}/share", "its share of the samples"),
    Metric("rollout/dynamic_filter/drop_{reason}", "groups that the dynamic sampling filter dropped"),
    Metric("rollout/unused_groups", "groups that were begun and neither train nor wait for later"),
    Metric("rollout/fully_async/staleness_{stat}", "weight updates that a group's oldest token is behind (max, mean)"),
    Metric("rollout/fully_async/stale_groups", "groups that were too stale and are generated anew (--max-staleness)"),
    Metric("rollout/fully_async/groups_ready", "finished groups that wait for the next rollout"),
    Metric("rollout/fully_async/groups_in_flight", "groups in generation when the batch was full"),
    Metric("rollout/fully_async/wait_time", "seconds that the rollout waited for groups"),
    Metric("rollout/engine_failures", "engines that died or hung and were taken out of service"),
    Metric("rollout/engine_failed_starts", "engines that did not start in the place of a failed one"),
    Metric("rollout/router_restarts", "times that a dead router was started again"),
    Metric("rollout/aborted_groups_retried", "groups cut off at the end of the rollout that are generated again"),
    Metric("rollout/aborted_groups_dropped", "groups cut off at the end of the rollout that are lost"),
    Metric("rollout/grader_{kind}", "gradings that failed (timeout, error); their reward is the lowest"),
    Metric("rollout/step", "the axis: the rollout's id (or optimiser steps, --wandb-always-use-train-step)"),
)
_DATA = (
    Metric("rollout/raw_reward", "mean reward before normalisation"),
    Metric("rollout/rewards", "mean reward after normalisation"),
    Metric("rollout/response_lengths", "mean tokens of a response"),
    Metric("rollout/total_lengths", "mean tokens of prompt and response"),
    Metric("rollout/truncated", "share of truncated samples among those that train"),
    Metric("rollout/round_number", "mean number of turns"),
    Metric("rollout/trimmed_samples", "samples that don't fill an optimiser step and are not trained"),
    Metric("rollout/log_probs", "mean log-prob of a token under the trainer, before the update"),
    Metric("rollout/ref_log_probs", "the same under the reference"),
    Metric("rollout/rollout_log_probs", "the same under the engine"),
    Metric("rollout/teacher_log_probs", "the same under the teacher"),
    Metric("rollout/advantages", "mean advantage of a token"),
    Metric("rollout/returns", "mean return of a token"),
    Metric("rollout/values", "mean value of a token"),
    Metric("rollout/kl", "mean KL to the reference that shapes rewards (--kl-coef)"),
    Metric("rollout/entropy", "mean entropy (--use-rollout-entropy)"),
    Metric("rollout/ref_entropy", "mean entropy of the reference"),
    Metric("rollout/opd_reverse_kl", "mean log-prob difference to the teacher (--use-opd)"),
    Metric("rollout/correct_{column}", "mean lengths of samples with reward 1 (--log-correct-samples)"),
    Metric("multi_turn/raw_response_length/response_length_{bound}", "tokens of responses (--log-multi-turn)"),
    Metric("multi_turn/wo_obs_response_length/response_length_{bound}", "the same without what was not sampled"),
    Metric("multi_turn/multi_turn_metric/round_number_{bound}", "turns per sample"),
    Metric("passrate/pass@{k}", "chance that one of k answers is right (--log-passrate)"),
)
_TRAIN = (
    Metric("train/{role-}loss", "the loss"),
    Metric("train/pg_loss", "its policy term"),
    Metric("train/entropy_loss", "mean entropy of a token"),
    Metric("train/kl_loss", "KL to the reference (--use-kl-loss)"),
    Metric("train/{role-}value_loss", "the critic's loss"),
    Metric("train/{role-}value_clipfrac", "share of tokens whose value was clipped"),
    Metric("train/pg_clipfrac", "share of tokens whose ratio was clipped"),
    Metric("train/ppo_kl", "mean log-ratio between the old policy and the current one"),
    Metric("train/train_rollout_logprob_abs_diff", "mean distance of the trainer's log-probs from the engine's"),
    Metric("train/ois", "mean ratio of the current policy to the old one"),
    Metric("train/tis", "mean weight between trainer and engine (--use-tis)"),
    Metric("train/tis_abs", "mean distance of that weight from 1"),
    Metric("train/tis_clipfrac", "share of weights that were bounded"),
    Metric("train/mis_{name}", "figures of the mismatch corrections (slime.backends.megatron_utils.loss.mis)"),
    Metric("train/opsm_clipfrac", "share of tokens that off-policy sequence masking drops"),
    Metric("train/opd_reverse_kl", "mean log-prob difference to the teacher"),
    Metric("train/mtp_loss", "cross-entropy of the multi-token-prediction layers, mean over layers"),
    Metric("train/mtp_{layer}_loss", "the same of one layer"),
    Metric("train/{role-}load_balancing_loss", "the routers' balancing loss, before its coefficient; 1: balanced"),
    Metric("train/{role-}seq_load_balancing_loss", "the same of single sequences, mean over the step's rollouts"),
    Metric("train/{role-}z_loss", "the routers' z-loss, before its coefficient"),
    Metric("train/routing_replay_changed", "share of a token's layers whose experts routing replay changed"),
    Metric("train/{role-}grad_norm", "gradient norm before clipping; nan where the step was skipped"),
    Metric("train/{role-}lr-pg_{index}", "learning rate of a parameter group"),
    Metric("train/{role-}global_batch_size", "rollouts in the step"),
    Metric("train/{role-}skipped_steps", "steps of the rollout that were skipped for a gradient that is not finite"),
    Metric("train/step", "the axis: optimiser steps"),
)
_REQUESTS = (
    Metric("perf/request/e2e_latency/{stat}", "seconds of a request"),
    Metric("perf/request/queue_time/{stat}", "of these in the engine's queue"),
    Metric("perf/decode/throughput/{stat}", "tokens per second of a request"),
    Metric("perf/prefill/{stage}/{stat}", "prefill/decode disaggregation: the prefill side's stages"),
    Metric("perf/decode/{stage}/{stat}", "prefill/decode disaggregation: the decode side's stages"),
)
_PERF = (
    Metric("perf/rollout_time", "seconds of the rollout"),
    Metric("perf/non_generation_time/{stat}", "seconds per sample outside generation (tools, rewards)"),
    Metric("perf/tokens_per_gpu_per_sec", "generated tokens per second and engine device"),
    Metric("perf/effective_tokens_per_gpu_per_sec", "the same, tokens that count for the loss only"),
    Metric("perf/longest_{kind}tokens_per_sec", "speed of the longest sample, which a rollout waits for"),
    Metric("perf/longest_{kind}non_generation_time", "its seconds outside generation"),
    Metric("perf/longest_{kind}tokens_per_sec_without_non_generation", "its speed without those"),
    *_REQUESTS,
    Metric("perf/{role-}train_time", "seconds of training on the rollout"),
    Metric("perf/{role-}train_wait_time", "seconds between two trainings"),
    Metric("perf/{role-}step_time", "both together"),
    Metric("perf/{role-}wait_time_ratio", "share of waiting in it"),
    Metric("perf/{role-}data_preprocess_time", "seconds of fetching and preparing the data"),
    Metric("perf/{role-}log_probs_time", "seconds of the trainer's log-prob pass"),
    Metric("perf/{role-}ref_log_probs_time", "seconds of the reference's"),
    Metric("perf/{role-}{tag}_log_probs_time", "seconds of another model's (teacher, older actor)"),
    Metric("perf/{role-}values_time", "seconds of the critic's pass"),
    Metric("perf/{role-}actor_train_time", "seconds of forward, backward and optimiser steps"),
    Metric("perf/{role-}value_train_time", "the same of the critic"),
    Metric("perf/{role-}ref_model_update_time", "seconds of copying the actor into the reference"),
    Metric("perf/{role-}update_weights_time", "seconds of sending weights to the engines"),
    Metric("perf/{role-}update_weights_density", "share of the weights' bytes that the last update changed (delta)"),
    Metric("perf/{role-}update_weights_wire_bytes", "bytes of the last update's files (delta)"),
    Metric("perf/{role-}sleep_time", "seconds of putting the trainer to sleep"),
    Metric("perf/{role-}wake_up_time", "seconds of waking it up"),
    Metric("perf/{role-}save_model_time", "seconds of saving"),
    Metric("perf/{role-}{pass}_tflops", "arithmetic per second and device, estimated from the architecture"),
    Metric("perf/{role-}actor_train_tok_per_s", "tokens trained per second, all devices together"),
)
_EVAL = (
    Metric("eval/{dataset}", "mean reward of the data set"),
    Metric("eval/{dataset}-truncated_ratio", "share of answers that hit a length limit"),
    Metric("eval/{dataset}-pass@{k}", "chance that one of k answers is right (--log-passrate)"),
    Metric("eval/{dataset}-mean@{n}", "mean reward, n answers per prompt (--log-passrate)"),
    Metric("eval/{dataset}/grader_{kind}", "gradings that failed (timeout, error); their reward is the lowest"),
    *(Metric(metric.name.replace("rollout/", "eval/{dataset}/", 1), metric.meaning) for metric in _SAMPLES),
    Metric("eval/step", "the axis, as rollout/step"),
)

SECTIONS: dict[str, tuple[Metric, ...]] = {
    "Rollout (from the rollout manager)": _ROLLOUT,
    "Train data (from the trainers, over all data-parallel ranks)": _DATA,
    "Optimiser steps": _TRAIN,
    "Speed": _PERF,
    "Evaluation": _EVAL,
}


def find_metric(name: str) -> Metric | None:
    """The entry of a logged name; exact names win over families."""
    entries = [metric for section in SECTIONS.values() for metric in section]
    exact = (metric for metric in entries if metric.name == name)
    return next(exact, None) or next((metric for metric in entries if metric.matches(name)), None)
