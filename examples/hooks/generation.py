"""Generation of one sample, and what happens to it before its reward."""

from __future__ import annotations

import copy
from argparse import Namespace
from typing import Any

from slime.rollout import sglang_rollout
from slime.utils.types import Sample


async def two_turns(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Answer, ask to check the answer, answer again. Only tokens that the engine sampled are trained."""
    if sample.response_length == 0:  # a sample that was cut off goes on where it was
        first = copy.copy(sampling_params)
        first["max_new_tokens"] = sampling_params["max_new_tokens"] // 2
        sample = await sglang_rollout.generate(args, sample, first)
        if sample.status is not Sample.Status.COMPLETED:
            return sample
    tokenizer = sglang_rollout.GenerateState(args).tokenizer
    question = "\nIs that right? Give the final answer.\n"
    ids = tokenizer(question, add_special_tokens=False)["input_ids"]
    sample.append_response_tokens(args, tokens=ids, text=question, trainable=False)
    sample.status = Sample.Status.PENDING
    return await sglang_rollout.generate(args, sample, sampling_params)


def count_lines(args: Namespace, sample: Sample, *, rollout_id: int | None = None, evaluation: bool = False) -> Sample:
    """Note a fact for later in the metadata; the reward function and filters can read it."""
    sample.metadata["lines"] = sample.response.count("\n") + 1
    return sample
