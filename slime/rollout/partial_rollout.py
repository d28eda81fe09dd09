"""Samples whose generation was cut short: to be continued, or begun again."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from slime.observability.trace_utils import trace_next_attempt
from slime.utils.types import Sample

RETRIES_KEY = "abort_retries"
LENGTH_KEY = "abort_length"
MAX_ABORT_RETRIES = 5
_KEPT_ON_RESET = (
    "group_index", "index", "rollout_id", "prompt", "multimodal_inputs", "apply_chat_template_kwargs", "label",
    "metadata", "generate_function_path", "custom_rm_path", "train_metadata",
)  # fmt: skip


def is_unfinished(item: Any) -> bool:
    """Whether a sample (or any of a list) was aborted and can't be trained on.

    An aborted sample that a generate function removed from the loss and gave a reward is a finished one.
    """
    if isinstance(item, list):
        return any(is_unfinished(part) for part in item)
    return item.status is Sample.Status.ABORTED and not (item.remove_sample and item.reward is not None)


def is_finished(item: Any) -> bool:
    """Whether a sample (or each of a list) has its answer and its reward."""
    if isinstance(item, list):
        return all(is_finished(part) for part in item)
    return item.status is not Sample.Status.PENDING and item.reward is not None and not is_unfinished(item)


def can_continue(group: list[Any]) -> bool:
    """Whether the group can go back to the data source; the parts of a fan-out can't be told apart again."""
    return all(isinstance(item, Sample) for item in group)


def reset_sample(sample: Sample) -> None:
    """Back to the bare prompt: nothing of an earlier attempt may stay."""
    fresh = Sample()
    for item in fields(Sample):
        if item.name not in _KEPT_ON_RESET:
            setattr(sample, item.name, getattr(fresh, item.name))


def mark_for_continuation(group: list[Sample], rollout_id: int) -> None:
    """Note on samples that have a part of their answer in which rollout it began."""
    for sample in group:
        if sample.response_length > 0:
            sample.metadata.setdefault("start_rollout_id", rollout_id)


def mask_off_policy_part(args: Any, sample: Sample) -> None:
    """Take what older weights made out of the loss, with --mask-offpolicy-in-partial-rollout."""
    if args.partial_rollout and args.mask_offpolicy_in_partial_rollout and sample.response_length > 0:
        sample.loss_mask = [0] * sample.response_length


def prepare_retry(group: list[Sample], keep_tokens: bool) -> None:
    """Make a group whose requests an engine aborted ready for another attempt.

    With `keep_tokens` an attempt that brought tokens doesn't count: the answer gets on.

    Raises:
        RuntimeError: it was aborted too often.
    """
    length = sum(sample.response_length for sample in group)
    grew = keep_tokens and length > group[0].metadata.get(LENGTH_KEY, 0)
    for sample in group:
        retries = 0 if grew else sample.metadata.get(RETRIES_KEY, 0) + 1
        sample.metadata[LENGTH_KEY] = length
        if retries > MAX_ABORT_RETRIES:
            raise RuntimeError(
                f"{sample.name()}: its group was aborted {retries} times; is something stopping engines?"
            )
        sample.metadata[RETRIES_KEY] = retries
        trace_next_attempt(sample)
        if is_unfinished(sample) and not keep_tokens:
            reset_sample(sample)
