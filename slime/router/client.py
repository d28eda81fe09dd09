"""Reads what slime's router keeps of a session."""

from __future__ import annotations

from typing import Any

from slime.rollout.sglang_rollout import get_model_url
from slime.utils.http_utils import post
from slime.utils.types import Sample


async def fill_sample(args: Any, sample: Sample, text: str, model_name: str = "actor") -> Sample:
    """Tokens, response, loss mask, log-probs and weight versions of the sample's session (`sample.session_id`).

    The response begins at the first sampled token; what a client wrote between answers has loss mask 0.

    Args:
        text: prompt and everything after it, as it was sent and received.

    Raises:
        HttpError: the router does not know the session, or no answer that the text begins with.
    """
    url = get_model_url(args, model_name, "/retrieve_from_text")
    kept = await post(url, {"session_id": sample.session_id, "text": text}, max_retries=0)
    begin = kept["prompt_length"]
    sample.tokens = list(kept["tokens"])
    sample.response = text[kept["prompt_characters"] :]
    sample.response_length = len(sample.tokens) - begin
    sample.loss_mask = list(kept["loss_mask"][begin:])
    sample.rollout_log_probs = list(kept["log_probs"][begin:])
    sample.weight_versions = list(kept["weight_versions"])
    return sample
