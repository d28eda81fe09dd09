"""Scenarios of test_weight_conversion.py: Hugging Face -> Megatron -> Hugging Face under several layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron_tiny import forward_logits, init_layout, make_args, packed_logits
from safetensors.torch import load_file

from slime.backends.megatron_utils.hf_checkpoint_saver import save_hf_model_to_path
from slime.backends.megatron_utils.optimizer import initialize_model_and_optimizer
from slime.backends.megatron_utils.update_weight.common import named_params_and_buffers, unwrap_model
from slime.backends.megatron_utils.update_weight.hf_weight_iterator import HfWeightIterator
from slime.backends.megatron_utils.weights_backuper import WeightsBackuper
from slime.utils.dry_run.parameters import count_rank_parameters

TP2 = "--tensor-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
PP2_VPP2 = f"{PP2} --num-layers-per-virtual-pipeline-stage 1"
EP2 = "--expert-model-parallel-size 2"
TP2_EP2 = (
    "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 --expert-tensor-parallel-size 1"
)
ETP2 = "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 2"


def check_round_trip(context: dict[str, str], name: str, flags: str = "") -> None:
    """Logits equal transformers' and the export equals the source, bit for bit, for one model under one layout.

    And the dry run's count of this rank's parameters is right.
    """
    from megatron.core import parallel_state

    source = Path(context["models"]) / name
    args = make_args(source, flags=flags)
    init_layout(args)
    model, optimizer, _, iteration = initialize_model_and_optimizer(args)
    assert optimizer is not None and iteration == -1
    held = sum(parameter.numel() for chunk in model for parameter in chunk.parameters())
    assert held == count_rank_parameters(args, parallel_state.get_pipeline_model_parallel_rank()).total
    reference = torch.load(source / "reference.pt")
    outputs = {"padded": forward_logits(model, reference["tokens"])}
    if args.pipeline_model_parallel_size == 1:
        outputs["packed"] = packed_logits(model, reference["tokens"])
    for kind, logits in outputs.items():
        if logits is None:
            continue
        assert (logits[..., args.vocab_size :] < -1e3).all(), "padded tokens take part in the softmax"
        difference = (logits[..., : args.vocab_size] - reference["logits"]).abs().max().item()
        assert difference < 1e-4, f"{kind} logits differ by {difference}"
    target = Path(context["out"]) / f"{name}{flags.replace(' ', '_')}_{dist.get_world_size()}"
    save_hf_model_to_path(args, target, model)
    assert_same_weights(read_all(source), read_all(target))
    assert (target / "tokenizer_config.json").read_bytes() == (source / "tokenizer_config.json").read_bytes()


def read_all(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor for file in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }


def assert_same_weights(expected: dict[str, torch.Tensor], actual: dict[str, torch.Tensor]) -> None:
    assert expected.keys() == actual.keys(), f"names differ: {expected.keys() ^ actual.keys()}"
    for name, tensor in expected.items():
        assert torch.equal(tensor, actual[name]), f"{name} differs"


def scenario_rotary_frequencies(context: dict[str, str]) -> None:
    """Llama 3's scaling moves angles by less than a short sequence shows: the frequencies themselves are compared."""
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    source = Path(context["models"]) / "llama"
    args = make_args(source)
    init_layout(args)
    model, _, _, _ = initialize_model_and_optimizer(args)
    ours = unwrap_model(model[0]).rotary_pos_emb.inv_freq
    config = AutoConfig.from_pretrained(source)
    assert torch.allclose(ours, LlamaRotaryEmbedding(config).inv_freq, rtol=1e-6, atol=0)
    config.rope_parameters = {"rope_type": "default", "rope_theta": config.rope_parameters["rope_theta"]}
    assert not torch.allclose(ours, LlamaRotaryEmbedding(config).inv_freq, rtol=0.5, atol=0)


def scenario_glm_spec(context: dict[str, str]) -> None:
    """The layer spec that launch scripts name gives the same model."""
    check_round_trip(context, "glm4", "--spec slime_plugins.models.glm4 get_glm_spec")


def scenario_sync_chunks(context: dict[str, str]) -> None:
    """Under TP2: every rank gets every tensor, buckets respect the limit, a backup's weights can be sent instead."""
    source = Path(context["models"]) / "qwen3"
    args = make_args(source, flags=TP2)
    init_layout(args)
    model, _, _, _ = initialize_model_and_optimizer(args)
    backuper = WeightsBackuper(lambda: named_params_and_buffers(args, model))
    backuper.backup("actor")
    for _, weight in named_params_and_buffers(args, model):
        weight.data.add_(1.0)
    iterator = HfWeightIterator(args, model)
    chunks = list(iterator.chunks(backuper.get("actor")))
    assert len(chunks) == iterator.num_chunks > 3
    for chunk in chunks:
        size = sum(tensor.numel() * tensor.element_size() for _, tensor in chunk)
        assert size <= args.update_weight_buffer_size or len(chunk) <= 3, f"a bucket of {size} bytes"
    assert_same_weights(read_all(source), dict(named for chunk in chunks for named in chunk))
    backuper.restore("actor")
    assert_same_weights(read_all(source), dict(named for chunk in iterator.chunks() for named in chunk))


def scenario_freeze(context: dict[str, str]) -> None:
    source = Path(context["models"]) / "qwen3"
    args = make_args(source, only_train_params_name_list=[r"layers\.1\."])
    init_layout(args)
    model, _, _, _ = initialize_model_and_optimizer(args)
    trained = {name for name, p in model[0].named_parameters() if p.requires_grad}
    assert trained and all(".layers.1." in name for name in trained), trained
    args.only_train_params_name_list = ["layers.1", "no_such_name"]
    expect(ValueError, "no_such_name", lambda: initialize_model_and_optimizer(args))


def scenario_bad_hf(context: dict[str, str]) -> None:
    """A directory of another model, or with weights that nobody uses, is an error that names the weights."""
    models = Path(context["models"])
    args = make_args(models / "qwen3", num_layers=3)
    init_layout(args)
    expect(ValueError, "model.layers.3.", lambda: initialize_model_and_optimizer(args))
    args = make_args(models / "qwen3", ffn_hidden_size=96)
    expect(ValueError, "mlp.linear_fc1.weight", lambda: initialize_model_and_optimizer(args))
    args = make_args(models / "qwen3", load=str(models / "absent"))
    expect(FileNotFoundError, "absent", lambda: initialize_model_and_optimizer(args))


def expect(error: type[Exception], text: str, call: Any) -> None:
    try:
        call()
    except error as raised:
        assert text in str(raised), f"{raised} does not name {text}"
    else:
        raise AssertionError(f"no {error.__name__} about {text}")
