"""Small real tokenizers, made in the test: nothing is read from disk or the network."""

from __future__ import annotations

from typing import Any

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<think>", "</think>", "<pad>"]


def byte_tokenizer(chat_template: str | None = None) -> Any:
    """One token per byte, and one per special tag."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.add_special_tokens({"additional_special_tokens": SPECIAL})
    fast.chat_template = chat_template
    return fast


def word_tokenizer(*words: str) -> Any:
    """One token per word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {word: i for i, word in enumerate(["[UNK]", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")
