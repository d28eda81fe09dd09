"""Loss masks of conversations, under templates of different habits."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime.rollout import sft_rollout
from slime.utils.mask_utils import MultiTurnLossMaskGenerator, get_response_lengths
from slime.utils.misc import SingletonMeta
from slime.utils.types import Sample
from tests.support.rollout_args import rollout_args
from tests.support.toy_tokenizer import byte_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Ends a turn with the tag of the next role (GLM).
NEXT_TAG = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Drops thinking before the last question, puts an empty block where there is none (Qwen3); groups tool results.
QWEN3 = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}"
    "{% set think = m.content.split('</think>')[0].split('<think>')[-1].strip() if '</think>' in m.content else '' %}"
    "{% set text = m.content.split('</think>')[-1].lstrip() %}"
    "<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last %}<think>\n{{ think }}\n</think>\n\n{% endif %}{{ text }}"
    "{% for call in m.tool_calls or [] %}[call {{ call }}]{% endfor %}<|im_end|>\n"
    "{% elif m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user\n{% endif %}<r>{{ m.content }}</r>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def trained(template: str, messages: list[dict[str, Any]], kind: str = "qwen") -> list[str]:
    tokenizer = byte_tokenizer(template)
    masks = MultiTurnLossMaskGenerator(tokenizer, kind)
    ids, mask = masks.get_loss_mask(messages)
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokenizer.decode(ids) == whole and len(ids) == len(mask), "the ids are the whole conversation's"
    return masks.get_text_from_loss_mask(ids, mask)


def turn(role: str, content: str, **extra: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **extra}


TWO_TURNS = [
    turn("system", "s"),
    turn("user", "u"),
    turn("assistant", "a1"),
    turn("user", "v"),
    turn("assistant", "a2"),
]


@pytest.mark.parametrize("kind", MultiTurnLossMaskGenerator.TYPES)
def test_every_turn_with_its_end(kind: str) -> None:
    """M6: all turns, whatever the name of the method."""
    assert trained(CHATML, TWO_TURNS, kind) == ["a1<|im_end|>", "a2<|im_end|>"]


def test_repeated_text_does_not_confuse() -> None:
    messages = [turn("user", "same"), turn("assistant", "same"), turn("user", "same"), turn("assistant", "same")]
    assert trained(CHATML, messages) == ["same<|im_end|>"] * 2


def test_the_next_role_s_tag_is_the_stop_decision() -> None:
    """M3"""
    messages = [turn("user", "q"), turn("assistant", "hi"), turn("user", "r"), turn("assistant", "yo")]
    assert trained(NEXT_TAG, messages) == ["hi<|user|>", "yo"]


def test_thinking_is_trained_only_where_it_was_sampled() -> None:
    """M4"""
    with_think = [turn("user", "u"), turn("assistant", "<think>\nhm\n</think>\n\na")]
    assert trained(QWEN3, with_think) == ["<think>\nhm\n</think>\n\na<|im_end|>"]
    assert trained(QWEN3, [turn("user", "u"), turn("assistant", "a")]) == ["a<|im_end|>"]
    history = [*with_think, turn("user", "v"), turn("assistant", "b")]
    assert trained(QWEN3, history) == ["a<|im_end|>", "b<|im_end|>"]


def test_tool_results_share_an_envelope_and_are_not_trained() -> None:
    """M2"""
    messages = [
        turn("user", "u"),
        turn("assistant", "", tool_calls=["A", "B"]),
        turn("tool", "ra"),
        turn("tool", "rb"),
        turn("assistant", "done"),
    ]
    assert trained(QWEN3, messages) == ["[call A][call B]<|im_end|>", "done<|im_end|>"]


def test_a_turn_can_be_left_out() -> None:
    """M5"""
    messages = [*TWO_TURNS[:2], turn("assistant", "a1", step_loss_mask=0), *TWO_TURNS[3:]]
    assert trained(CHATML, messages) == ["a2<|im_end|>"]


def test_response_lengths() -> None:
    """M1"""
    assert get_response_lengths([[0, 0, 1, 1, 0, 1], [0, 0, 0], [1]]) == [4, 0, 1]


def test_repeated_placeholders_of_a_processor() -> None:
    tokenizer = byte_tokenizer(CHATML)
    masks = MultiTurnLossMaskGenerator(tokenizer, "qwen")
    messages = [turn("user", "<pad>?"), turn("assistant", "a")]
    ids, mask = masks.get_loss_mask(messages)
    pad = tokenizer.convert_tokens_to_ids("<pad>")
    at = ids.index(pad)
    expanded = [*ids[:at], pad, pad, pad, *ids[at + 1 :]]
    got_ids, got = masks.get_loss_mask_with_multimodal_alignment(messages, expanded)
    assert got_ids == expanded and got == [*mask[:at], 0, 0, 0, *mask[at + 1 :]]
    with pytest.raises(ValueError, match="don't contain"):
        masks.get_loss_mask_with_multimodal_alignment(messages, expanded[:5])


def test_unknown_type() -> None:
    with pytest.raises(ValueError, match="there are general, qwen"):
        MultiTurnLossMaskGenerator(byte_tokenizer(CHATML), "qwen9")


class Conversations:
    def __init__(self, *prompts: Any) -> None:
        self.prompts = prompts

    def get_samples(self, number: int) -> list[list[Sample]]:
        return [[Sample(prompt=prompt, index=i, group_index=i)] for i, prompt in enumerate(self.prompts[:number])]


@pytest.fixture
def sft_args(tmp_path: Path) -> Namespace:
    byte_tokenizer(CHATML).save_pretrained(tmp_path)
    SingletonMeta.clear_instances(sft_rollout._Encoder)
    return rollout_args(hf_checkpoint=str(tmp_path), n_samples_per_prompt=1)


def test_sft_rollout(sft_args: Namespace) -> None:
    """D3: message lists all the way."""
    output = sft_rollout.generate_rollout(sft_args, 0, Conversations(TWO_TURNS, TWO_TURNS[:3]))
    ((first,), (second,)) = output.samples
    assert first.response == "a1<|im_end|>\n<|im_start|>user\nv<|im_end|>\n<|im_start|>assistant\na2<|im_end|>\n"
    assert first.response_length == len(first.loss_mask) and sum(first.loss_mask) == 6
    assert second.response == "a1<|im_end|>\n" and second.loss_mask == [1, 1, 1, 0]
    assert first.reward == 0.0 and first.status is Sample.Status.COMPLETED and first.rollout_log_probs is None


def test_sft_says_what_it_can_t_do(sft_args: Namespace) -> None:
    with pytest.raises(ValueError, match="this prompt is a string"):
        sft_rollout.generate_rollout(sft_args, 0, Conversations("text"))
    with pytest.raises(ValueError, match=r"sample 0 .*no assistant turn"):
        sft_rollout.generate_rollout(sft_args, 0, Conversations([turn("user", "u")]))
    with pytest.raises(ValueError, match="--eval-function-path"):
        sft_rollout.generate_rollout(sft_args, 0, Conversations(TWO_TURNS), evaluation=True)
    sft_args.n_samples_per_prompt = 2
    with pytest.raises(ValueError, match="--n-samples-per-prompt 1"):
        sft_rollout.generate_rollout(sft_args, 0, Conversations(TWO_TURNS))
