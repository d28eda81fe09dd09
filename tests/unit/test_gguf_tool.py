"""tools/convert_gguf_to_hf.py on a tiny file made with the gguf package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

TOOL = Path(__file__).parents[2] / "tools" / "convert_gguf_to_hf.py"
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"0123456789", "Ġ", "a", "b", "ab", "Ġab"]
MERGES = ["a b", "Ġ ab"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
HEADS, GROUPS, HIDDEN = 6, 2, 48


def interleaved(weight: torch.Tensor, heads: int) -> Any:
    """How llama.cpp stores q and k: the two halves of each head alternate."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns).numpy()


@pytest.fixture
def model(tmp_path: Path) -> Any:
    """A tiny llama model, and its GGUF file `tiny.gguf` in float32."""
    import gguf
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS), hidden_size=HIDDEN, intermediate_size=80, num_hidden_layers=2,
        num_attention_heads=HEADS, num_key_value_heads=GROUPS, rms_norm_eps=1e-5, rope_theta=5000.0,
        max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_vocab_size(len(TOKENS))
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(80)
    writer.add_block_count(2)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(GROUPS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    writer.add_context_length(64)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    for add, number in ((writer.add_bos_token_id, 1), (writer.add_eos_token_id, 2), (writer.add_pad_token_id, 2)):
        add(number)
    writer.add_chat_template(TEMPLATE)
    state = model.state_dict()
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"].numpy())
    writer.add_tensor("output_norm.weight", state["model.norm.weight"].numpy())
    kinds = {"attn_q": ("self_attn.q_proj", HEADS), "attn_k": ("self_attn.k_proj", GROUPS)}
    kinds |= {name: (hf, 0) for name, hf in tool().LAYER_NAMES.items() if name not in kinds}
    for layer in range(2):
        for name, (hf, heads) in kinds.items():
            weight = state[f"model.layers.{layer}.{hf}.weight"]
            writer.add_tensor(f"blk.{layer}.{name}.weight", interleaved(weight, heads) if heads else weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def tool() -> Any:
    spec = importlib.util.spec_from_file_location("convert_gguf_to_hf", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_model_comes_back(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same weights and logits; special tokens, single digits and the chat template; nothing is overwritten."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    words = ["tool", "--gguf", str(tmp_path / "tiny.gguf"), "--save-dir", str(tmp_path / "hf"), "--dtype", "float32"]
    monkeypatch.setattr(sys, "argv", [*words, "--dry-run"])
    tool().main()
    assert "million numbers in F32" in capsys.readouterr().out and not (tmp_path / "hf").exists()
    monkeypatch.setattr(sys, "argv", words)
    tool().main()
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    for name, weight in model.state_dict().items():
        assert torch.equal(back.state_dict()[name], weight), name
    ids = torch.tensor([[5, 9, 14, 3]])
    torch.testing.assert_close(back(ids).logits, model(ids).logits)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "12 ab"}], return_dict=False)
    assert chat == [1, TOKENS.index("1"), TOKENS.index("2"), TOKENS.index("Ġab"), 2]
    assert back.generation_config.eos_token_id == 2
    with pytest.raises(SystemExit, match="exists"):
        tool().main()


def test_another_architecture_is_refused() -> None:
    with pytest.raises(ValueError, match="'gemma'"):
        tool().config_from_gguf({"general.architecture": "gemma"}, [])
    with pytest.raises(ValueError, match=r"blk\.0\.ssm_in"):
        tool().hf_name("blk.0.ssm_in.weight")
