"""On-policy distillation from a teacher that an SGLang server runs (`--use-opd --opd-type sglang`).

    --custom-rm-path slime.rollout.on_policy_distillation.reward_func
    --custom-reward-post-process-path slime.rollout.on_policy_distillation.post_process_rewards
    --rm-url http://teacher:30000/generate

The teacher's log-probs of the student's tokens become `Sample.teacher_log_probs`; rewards are 0, so the advantages are
the reverse KL alone. A reward function of one's own can call `fetch_teacher_log_probs` and return its own reward.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from slime.utils.http_utils import post
from slime.utils.types import Sample


async def reward_func(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """Set the sample's teacher log-probs; 0."""
    sample.teacher_log_probs = await fetch_teacher_log_probs(args, sample)
    return 0.0


def post_process_rewards(args: Namespace, samples: list[Sample], **kwargs: Any) -> tuple[list[float], list[float]]:
    """(raw rewards, rewards), all 0. A sample whose reward is the teacher's raw answer gets its log-probs from it.

    Raises:
        ValueError: a sample has no teacher log-probs.
    """
    for sample in samples:
        if isinstance(sample.reward, dict) and "meta_info" in sample.reward:
            sample.teacher_log_probs = response_log_probs(sample, sample.reward)
        if sample.teacher_log_probs is None:
            raise ValueError(f"{sample.name()} has no teacher log-probs: set --custom-rm-path {__name__}.reward_func")
    return [0.0] * len(samples), [0.0] * len(samples)


async def fetch_teacher_log_probs(args: Namespace, sample: Sample) -> list[float]:
    """Log-probs of the sample's response tokens under the teacher at `args.rm_url`.

    The request names the temperature at which the student sampled; see docs/losses.md for what servers make of it.

    Raises:
        ValueError: there is no URL, or the answer does not fit the sample.
    """
    if not args.rm_url:
        raise ValueError("the teacher's server needs --rm-url (http://host:port/generate)")
    payload = {
        "input_ids": sample.tokens,
        "sampling_params": {
            "temperature": args.rollout_temperature,
            "max_new_tokens": 0,
            "skip_special_tokens": False,
        },
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    return response_log_probs(sample, await post(args.rm_url, payload))


def response_log_probs(sample: Sample, answer: dict[str, Any]) -> list[float]:
    """The last `response_length` of the input log-probs in an engine's answer.

    Raises:
        ValueError: the answer holds other tokens than the sample, or no number for one.
    """
    entries = answer["meta_info"]["input_token_logprobs"]
    if [entry[1] for entry in entries] != list(sample.tokens):
        raise ValueError(
            f"{sample.name()}: the teacher answered with log-probs of {len(entries)} tokens that are not the sample's "
            f"{len(sample.tokens)}"
        )
    values = [entry[0] for entry in entries[len(entries) - sample.response_length :]]
    if None in values:
        raise ValueError(
            f"{sample.name()}: the teacher gave no log-prob for token {values.index(None)} of the response"
        )
    return [float(value) for value in values]
