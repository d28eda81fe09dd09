"""The shared server answers as slime's parts expect."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

from tests.support.engine import SGLangServer


def generate(url: str, **request: Any) -> dict[str, Any]:
    body = json.dumps({"return_logprob": True, **request}).encode()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    post = urllib.request.Request(f"{url}/generate", body, {"Content-Type": "application/json"})
    with opener.open(post, timeout=60) as response:
        return json.load(response)


def test_token_ids_in_ids_and_log_probs_out(sglang_server: SGLangServer) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    first = generate(sglang_server.url, input_ids=[5, 6, 7], sampling_params=sampling)
    again = generate(sglang_server.url, input_ids=[5, 6, 7], sampling_params=sampling)
    tokens = [token for _, token, _ in first["meta_info"]["output_token_logprobs"]]
    assert len(tokens) == 8 and first["meta_info"]["finish_reason"]["type"] == "length"
    assert tokens == [token for _, token, _ in again["meta_info"]["output_token_logprobs"]]
    assert all(log_prob <= 0 for log_prob, _, _ in first["meta_info"]["output_token_logprobs"])
