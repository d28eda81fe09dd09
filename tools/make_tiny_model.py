"""Make a tiny Qwen3-architecture model with its tokenizer in Hugging Face format, for runs and tests on a CPU.

    python tools/make_tiny_model.py --output-dir models/tiny

The weights are random: the model knows nothing yet. The tokenizer can encode any text (it falls back to bytes), keeps
each digit a token of its own, and knows the wording of reasoning-gym's sums, so a problem is about 15 tokens long.
"""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
KNOWN_PHRASES = [
    "user\nState the final answer to the following arithmetic problem: ",
    " + ",
    " - ",
    " =",
    "assistant\n",
    "user\n",
    "system\n",
]


@dataclass(frozen=True)
class TinyModelSizes:
    """Architecture of the model. All sizes differ from each other, so that a mix-up of two shows as an error.

    `initializer_range` is the standard deviation of the embeddings; matrices start with 1/sqrt(inputs).
    """

    hidden_size: int = 128
    intermediate_size: int = 352
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 24
    max_position_embeddings: int = 4096
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    initializer_range: float = 0.1
    seed: int = 0


def make_tiny_model(out_dir: str | Path, **sizes: int | float | bool) -> Path:
    """Write config, weights (float32) and tokenizer to `out_dir`; the same bytes for the same arguments.

    Args:
        sizes: fields of `TinyModelSizes` that are to differ from their defaults.

    Raises:
        TypeError: a name in `sizes` is no field.
        ValueError: the heads cannot be divided among the key-value heads.
    """
    shape = TinyModelSizes(**sizes)  # type: ignore[arg-type]
    if shape.num_attention_heads % shape.num_key_value_heads:
        raise ValueError(
            f"num_attention_heads {shape.num_attention_heads} is no multiple of "
            f"num_key_value_heads {shape.num_key_value_heads}"
        )
    out = Path(out_dir)
    tokenizer = build_tokenizer()
    model = _build_model(shape, tokenizer)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer that splits off every digit and has `KNOWN_PHRASES` as tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(SPECIAL_TOKENS + alphabet)}
    merges: list[tuple[str, str]] = []
    for phrase in KNOWN_PHRASES:
        _add_phrase(phrase, vocab, merges)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    end_of_text, _, end_of_turn = SPECIAL_TOKENS
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end_of_turn, pad_token=end_of_text)
    fast.add_special_tokens({"additional_special_tokens": SPECIAL_TOKENS})
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _add_phrase(phrase: str, vocab: dict[str, int], merges: list[tuple[str, str]]) -> None:
    """Add merges, left to right, that make `phrase` one token."""
    from tokenizers import pre_tokenizers

    ((spelled, _),) = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(phrase)
    known = spelled[0]
    for character in spelled[1:]:
        if known + character not in vocab:
            merges.append((known, character))
            vocab[known + character] = len(vocab)
        known += character


def _build_config(shape: TinyModelSizes, tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    from transformers import Qwen3Config

    fields = dataclasses.asdict(shape)
    del fields["seed"]
    return Qwen3Config(
        **fields,
        vocab_size=len(tokenizer),
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        architectures=["Qwen3ForCausalLM"],
    )


def _build_model(shape: TinyModelSizes, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    import torch
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM(_build_config(shape, tokenizer)).to(torch.float32)
    generator = torch.Generator().manual_seed(shape.seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() < 2:
                weight.fill_(1.0)  # norms
            elif "embed_tokens" in name or "lm_head" in name:
                weight.normal_(0.0, shape.initializer_range, generator=generator)
            else:
                weight.normal_(0.0, weight.shape[1] ** -0.5, generator=generator)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a tiny Qwen3-architecture model in Hugging Face format.")
    parser.add_argument("--output-dir", required=True, help="folder to write to")
    for field in dataclasses.fields(TinyModelSizes):
        default = field.default
        kind = _boolean if isinstance(default, bool) else type(default)
        name = "--" + field.name.replace("_", "-")
        parser.add_argument(name, type=kind, default=default, help=f"default {default}")
    values = vars(parser.parse_args())
    out = make_tiny_model(values.pop("output_dir"), **values)
    print(f"wrote {out}")


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() == "true"


if __name__ == "__main__":
    main()
