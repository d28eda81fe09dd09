"""Loss masks of conversations, under templates of different habits."""

from __future__ import annotations

import random
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime.rollout import sft_rollout
from slime.utils.mask_utils import MultiTurnLossMaskGenerator, get_response_lengths
from slime.utils.misc import SingletonMeta
from slime.utils.turn_spans import Turns
from slime.utils.types import Sample
from tests.support.real_tokenizer import real_tokenizer
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


CALLS = [
    {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}},
    {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}},
]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]
QWEN_CALLS = (
    '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>'
)
QWEN3_5_CALLS = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n</function>\n</tool_call><|im_end|>"
)
GLM_CALLS = (
    "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>\n"
    "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n</tool_call><|observation|>"
)
THINK = "<think>\nhm\n</think>\n\n"
# Family → what a model sampled in: a thinking answer, then a plain one; and in: thinking with tool calls, an answer.
FAMILIES = {
    "qwen2_5": (
        [THINK + "a<|im_end|>", "b<|im_end|>"],
        [THINK + "see\n" + QWEN_CALLS, THINK + "done<|im_end|>"],
    ),
    "qwen3": (
        ["a<|im_end|>", "b<|im_end|>"],
        [THINK + "see\n" + QWEN_CALLS, THINK + "done<|im_end|>"],
    ),
    # Its generation prompt opens the thinking block.
    "qwen3_5": (
        ["a<|im_end|>", "b<|im_end|>"],
        ["hm\n</think>\n\nsee\n\n" + QWEN3_5_CALLS, "hm\n</think>\n\ndone<|im_end|>"],
    ),
    "glm4": (
        ["a<|user|>", "b"],
        ["\n<think>hm</think>\nsee\n" + GLM_CALLS, "\n<think>hm</think>\ndone"],
    ),
    "distill_qwen": (["\n\na<｜end▁of▁sentence｜>", "b<｜end▁of▁sentence｜>"], None),
    # Renders a single call per message, and nothing beside it.
    "llama3": (
        [THINK + "a<|eot_id|>", "b<|eot_id|>"],
        ['{"name": "add", "parameters": {"a": 1}}<|eot_id|>', THINK + "done<|eot_id|>"],
    ),
}


def trained_by_family(family: str, messages: list[dict[str, Any]], tools: Any = None) -> list[str]:
    tokenizer = real_tokenizer(family)
    masks = MultiTurnLossMaskGenerator(tokenizer, "general")
    ids, mask = masks.get_loss_mask(messages, tools)
    assert ids == tokenizer.apply_chat_template(messages, tools=tools, return_dict=True)["input_ids"]
    return masks.get_text_from_loss_mask(ids, mask)


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_under_real_templates(family: str) -> None:
    """M3, M4, M6: what was sampled and the end of each turn; thinking only where the template keeps it."""
    messages = [turn("system", "s"), turn("user", "u"), turn("assistant", THINK + "a")]
    messages += [turn("user", "v"), turn("assistant", "b")]
    assert trained_by_family(family, messages) == FAMILIES[family][0]


@pytest.mark.parametrize("family", [family for family, (_, tools) in FAMILIES.items() if tools])
def test_tool_calls_under_real_templates(family: str) -> None:
    """M2: calls are trained, their results are not."""
    calls = CALLS[:1] if family == "llama3" else CALLS
    messages = [turn("user", "u"), turn("assistant", THINK + "see", tool_calls=calls)]
    messages += [turn("tool", "1") for _ in calls] + [turn("assistant", THINK + "done")]
    assert trained_by_family(family, messages, TOOLS) == FAMILIES[family][1]


def random_conversation(draw: random.Random, calls_at_most: int) -> list[dict[str, Any]]:
    """One to four questions with thinking, tool calls, repeated and awkward texts."""
    texts = ["same", "x", "a\nb", " spaced ", "<tool_response>", "42"]
    messages = [turn("system", "s")] if draw.random() < 0.5 else []
    for _ in range(draw.randint(1, 4)):
        messages.append(turn("user", draw.choice(texts)))
        for calls in [*([draw.randint(1, calls_at_most)] if draw.random() < 0.5 else []), 0]:
            answer = turn("assistant", draw.choice([THINK, ""]) + draw.choice(texts))
            if draw.random() < 0.2:
                answer = turn("assistant", "a", reasoning_content="r")
            messages.append(answer | ({"tool_calls": CALLS[:calls]} if calls else {}))
            messages += [turn("tool", draw.choice(texts)) for _ in range(calls)]
    return messages


@pytest.mark.parametrize("family", FAMILIES)
def test_all_at_once_and_turn_by_turn_agree(family: str) -> None:
    draw, tokenizer, both = random.Random(5), real_tokenizer(family), 0
    for _ in range(20):
        messages = random_conversation(draw, calls_at_most=1 if family == "llama3" else 2)

        def render(some: list[dict[str, Any]], prompt: bool) -> str:
            return tokenizer.apply_chat_template(some, tokenize=False, add_generation_prompt=prompt)

        turns = Turns(render, messages, render(messages, False))
        at_once = turns.spans_at_once()
        if at_once is not None:
            both += 1
            assert at_once == turns.spans_one_by_one(), messages
    assert both >= 5


def test_the_cost_does_not_grow_with_the_square_of_the_turns() -> None:
    """M12: the number of renderings is the same for 4 and for 64 questions, though thinking is dropped."""
    tokenizer, counts = real_tokenizer("qwen3"), []
    for questions in (4, 64):
        messages = [
            turn(role, f"{THINK if role == 'assistant' else ''}{role} {i}")
            for i in range(questions)
            for role in ("user", "assistant")
        ]
        renderings: list[int] = []

        def render(some: list[dict[str, Any]], prompt: bool, renderings: list[int] = renderings) -> str:
            renderings.append(len(some))
            return tokenizer.apply_chat_template(some, tokenize=False, add_generation_prompt=prompt)

        assert len(Turns(render, messages, render(messages, False)).spans()) == questions
        counts.append(len(renderings))
    assert counts[0] == counts[1] < 10


def test_template_arguments() -> None:
    masks = MultiTurnLossMaskGenerator(real_tokenizer("glm4"), "glm4")
    messages = [turn("user", "u"), turn("assistant", "a")]
    ids, _ = masks.get_loss_mask(messages, template_kwargs={"enable_thinking": False})
    assert masks.tokenizer.decode(ids) == "[gMASK]<sop><|user|>\nu/nothink<|assistant|>\n<think></think>\na"


GENERATION = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}<|user|>{{ m.content }}{% endif %}"
    "{% endfor %}"
)


def test_a_template_that_marks_what_it_generates() -> None:
    assert trained(GENERATION, TWO_TURNS) == ["a1<|im_end|>", "a2<|im_end|>"]
    left_out = [*TWO_TURNS[:2], turn("assistant", "a1", step_loss_mask=0), *TWO_TURNS[3:]]
    assert trained(GENERATION, left_out) == ["a2<|im_end|>"]
    skips_some = GENERATION.replace("{% if m.role == 'assistant' %}", "{% if m.role == 'assistant' and m.content %}")
    with pytest.raises(ValueError, match="marks 1 stretches as generated for 2 assistant messages"):
        trained(skips_some, [turn("user", "u"), turn("assistant", ""), turn("assistant", "b", step_loss_mask=0)])


def test_results_that_are_rendered_only_behind_a_call() -> None:
    """Without the call in front of it the result would vanish: the turn is found without what follows."""
    template = CHATML.replace(
        "{% for m in messages %}",
        "{% for m in messages %}{% if m.role != 'tool' or messages[loop.index0 - 1].tool_calls %}",
    ).replace("{{ m.content }}<|im_end|>\n", "{{ m.content }}{{ m.tool_calls or '' }}<|im_end|>\n{% endif %}")
    messages = [turn("user", "u"), turn("assistant", "c", tool_calls="!"), turn("tool", "r"), turn("assistant", "d")]
    assert trained(template, messages) == ["c!<|im_end|>", "d<|im_end|>"]


def test_a_template_in_which_turns_cannot_be_told_is_an_error() -> None:
    template = "{{ messages | map(attribute='content') | join | length }}" + CHATML
    with pytest.raises(ValueError, match="renders assistant message 2 in a way that can't be told"):
        trained(template, TWO_TURNS)


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


def test_sft_names_the_row_that_has_no_mask(sft_args: Namespace) -> None:
    encoder = sft_rollout._Encoder(sft_args)
    encoder.tokenizer.chat_template = "{{ messages | map(attribute='content') | join | length }}" + CHATML
    with pytest.raises(ValueError, match=r"sample 0 .*the chat template renders assistant message 2"):
        sft_rollout.generate_rollout(sft_args, 0, Conversations(TWO_TURNS))
    encoder.tokenizer.chat_template = "{{ raise_exception('no system prompt, please') }}"
    with pytest.raises(ValueError, match=r"sample 0 .*no system prompt, please"):
        sft_rollout.generate_rollout(sft_args, 0, Conversations(TWO_TURNS))


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
