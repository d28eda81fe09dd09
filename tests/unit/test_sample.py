"""Sample: appending tokens, lengths, and the way through dicts."""

from __future__ import annotations

import base64
from argparse import Namespace

import numpy as np
import pytest

from slime.utils.types import MultimodalTypes, Sample


def sample() -> Sample:
    return Sample(index=3, group_index=1, tokens=[1, 2])


def test_tokens_of_the_model_and_of_tools() -> None:
    s = sample()
    s.append_response_tokens(tokens=[5, 6], log_probs=[-0.1, -0.2], text="ab")
    s.append_response_tokens(tokens=[7], trainable=False, text="t")
    s.append_response_tokens(tokens=[8], log_probs=[-0.3])
    assert (s.tokens, s.response_length, s.response) == ([1, 2, 5, 6, 7, 8], 4, "abt")
    assert s.loss_mask == [1, 1, 0, 1] and s.rollout_log_probs == [-0.1, -0.2, 0.0, -0.3]
    assert s.effective_response_length == 3


@pytest.mark.parametrize(("finish", "status"), [("length", "TRUNCATED"), ("stop", "COMPLETED"), ("abort", "ABORTED")])
def test_status_is_the_finish_reason(finish: str, status: str) -> None:
    """M14"""
    s = sample()
    meta = {"finish_reason": {"type": finish}, "weight_version": "7", "cached_tokens": 2, "prompt_tokens": 4}
    s.append_response_tokens(tokens=[5], log_probs=[-1.0], meta_info=meta)
    assert s.status is Sample.Status[status] and s.weight_versions == ["7"]
    assert s.prefix_cache_info.prefix_cache_hit_rate == 0.5


def test_each_weight_version_of_a_request_once() -> None:
    s = sample()
    spans = [{"version": v, "start": i, "end": i + 1} for i, v in enumerate([3, 4, 4])]
    meta = {"finish_reason": {"type": "stop"}, "weight_versions": spans, "weight_version": "4"}
    s.append_response_tokens(tokens=[5], log_probs=[-1.0], meta_info=meta)
    assert s.weight_versions == ["3", "4"]


def test_no_terminal_info_before_the_end() -> None:
    s = sample()
    s.append_response_tokens(tokens=[5], log_probs=[-1.0], meta_info={"finish_reason": None, "weight_version": "1"})
    assert s.status is Sample.Status.PENDING and s.weight_versions == []


def test_log_probs_must_fit() -> None:
    with pytest.raises(ValueError, match=r"sample 3 .*2 trainable tokens need as many log_probs, got 1"):
        sample().append_response_tokens(tokens=[5, 6], log_probs=[-1.0])
    with pytest.raises(ValueError, match=r"sample 3 .*got none"):
        sample().append_response_tokens(tokens=[5])
    with pytest.raises(ValueError, match="must not bring log_probs"):
        sample().append_response_tokens(tokens=[5], log_probs=[-1.0], trainable=False)


def test_stale_fields_are_found() -> None:
    """M7: five old log-probs on a sample without response."""
    s = sample()
    s.rollout_log_probs = [-1.0] * 5
    with pytest.raises(ValueError, match=r"rollout_log_probs has 6 entries for response_length 1"):
        s.append_response_tokens(tokens=[5], log_probs=[-1.0])


def test_unknown_finish_reason() -> None:
    with pytest.raises(ValueError, match="unknown finish reason"):
        sample().append_response_tokens(meta_info={"finish_reason": {"type": "gone"}})


def encode(values: list[int]) -> str:
    return base64.b64encode(np.array(values, dtype=np.int32).tobytes()).decode()


def test_nucleus_sets_stay_ragged_over_tool_tokens() -> None:
    s = sample()
    s.append_response_tokens(tokens=[9], trainable=False)
    meta = {"top_p_token_ids": encode([4, 5, 6]), "top_p_token_offsets": [0, 2, 3]}
    s.append_response_tokens(tokens=[4, 6], log_probs=[-1.0, -1.0], meta_info=meta)
    s.append_response_tokens(tokens=[9], trainable=False)
    assert s.rollout_top_p_token_ids == [4, 5, 6] and s.rollout_top_p_token_offsets == [0, 0, 2, 3, 3]


def test_routed_experts_continue_behind_a_start() -> None:
    args = Namespace(num_layers=1, moe_router_topk=2)
    s = sample()
    s.append_response_tokens(args, tokens=[5], log_probs=[-1.0], meta_info={"routed_experts": encode([0, 1, 2, 3])})
    meta = {"routed_experts": encode([6, 7]), "routed_experts_start_len": 2}
    s.append_response_tokens(args, tokens=[6], log_probs=[-1.0], meta_info=meta)
    assert s.rollout_routed_experts.tolist() == [[[0, 1]], [[2, 3]], [[6, 7]]]


@pytest.mark.parametrize(
    ("experts", "start", "part"),
    [
        ([0, 1], 0, r"sample 3 \(group 1\): 1 rows of routed experts for 3 tokens \(expected one less\)"),
        ([0, 1, 2], 0, "3 routed experts don't divide into 1 layers x top 2"),
        ([0, 1], 1, "routed experts from token 1 on, but those before it are missing"),
    ],
)
def test_routed_experts_of_other_tokens_are_refused(experts: list[int], start: int, part: str) -> None:
    args = Namespace(num_layers=1, moe_router_topk=2)
    meta = {"routed_experts": encode(experts), "routed_experts_start_len": start}
    with pytest.raises(ValueError, match=part):
        sample().append_response_tokens(args, tokens=[5], log_probs=[-1.0], meta_info=meta)


def test_dict_and_back_with_free_attributes() -> None:
    s = sample()
    s.status = Sample.Status.TRUNCATED
    s.spec_info.add(
        {"spec_accept_token_num": 3, "spec_draft_token_num": 4, "spec_verify_ct": 2, "completion_tokens": 6}
    )
    s.payload_text = "free"
    data = s.to_dict()
    back = Sample.from_dict(data)
    assert data["status"] == "truncated" and back == s and back.payload_text == "free"
    assert (back.spec_info.spec_accept_rate, back.spec_info.spec_accept_length) == (0.75, 3.0)


def test_reward_value() -> None:
    """R8"""
    s = sample()
    s.reward = {"score": 1, "fmt": 0}
    assert s.get_reward_value(Namespace(reward_key="score")) == 1
    with pytest.raises(ValueError, match=r"--reward-key"):
        s.get_reward_value(Namespace(reward_key=None))
    with pytest.raises(ValueError, match=r"no key 'x'.*\['fmt', 'score'\]"):
        s.get_reward_value(Namespace(reward_key="x"))


def test_multimodal_types() -> None:
    assert MultimodalTypes.get("image").placeholder == "<image>"
    with pytest.raises(ValueError, match="unknown multimodal type"):
        MultimodalTypes.get("smell")
