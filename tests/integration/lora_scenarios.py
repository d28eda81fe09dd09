"""Scenarios of test_lora.py: what adapters compute, what is merged, exported, saved, resumed and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lora_models import LORA_FLAGS, RANK, merged_tensors, read_tensors
from megatron_tiny import forward_logits, init_layout, make_args, train_step
from safetensors.torch import load_file
from weight_scenarios import EP2, PP2, PP2_VPP2, TP2, assert_same_weights, expect

from slime.backends.megatron_utils.checkpoint import save_checkpoint
from slime.backends.megatron_utils.hf_checkpoint_saver import save_hf_model_to_path
from slime.backends.megatron_utils.lora.gather import gather_adapters
from slime.backends.megatron_utils.lora.peft_format import save_adapter
from slime.backends.megatron_utils.lora.weights import named_adapters
from slime.backends.megatron_utils.optimizer import initialize_model_and_optimizer
from slime.backends.megatron_utils.update_weight.common import named_params_and_buffers
from slime.backends.megatron_utils.update_weight.hf_weight_iterator import HfWeightIterator

ATTENTION_FLAGS = "--lora-rank 4 --lora-alpha 6 --lora-targets q_proj v_proj o_proj"


def build(args: Any) -> tuple[Any, Any, Any, int]:
    init_layout(args)
    return initialize_model_and_optimizer(args)


def check_adapted(context: dict[str, str], name: str, flags: str) -> None:
    """Logits equal those of transformers with the adapter merged by hand; so do the exported weights; the adapter is
    exported as it was loaded, and the base stays the base."""
    root = Path(context["root"])
    source, adapter, merged = (root / kind / name for kind in ("models", "adapters", "merged"))
    args = make_args(source, flags=f"{LORA_FLAGS} --lora-load {adapter} {flags}")
    model, _, _, iteration = build(args)
    assert iteration == -1
    reference = torch.load(merged / "reference.pt")
    logits = forward_logits(model, reference["tokens"])
    if logits is not None:
        difference = (logits[..., : args.vocab_size] - reference["logits"]).abs().max().item()
        assert difference < 1e-4, f"logits differ by {difference}"
    out = root / "out" / f"{name}-{dist.get_world_size()}-{'-'.join(flags.split())}"
    save_hf_model_to_path(args, out / "merged", model)
    expected = read_tensors(merged)
    for key, tensor in read_tensors(out / "merged").items():
        torch.testing.assert_close(
            tensor, expected.pop(key), rtol=2e-6, atol=1e-7, msg=lambda text, key=key: key + text
        )
    assert not expected
    save_adapter(args, out / "adapter", model)
    stored = "adapter_model.safetensors"
    assert_same_weights(load_file(adapter / stored), load_file(out / "adapter" / stored))
    base = make_args(source, flags=flags)
    without = {key: value.clone() for key, value in named_params_and_buffers(args, model)}
    assert_same_weights({key: value.data for key, value in named_params_and_buffers(base, build(base)[0])}, without)


def scenario_new_adapters_change_nothing(context: dict[str, str]) -> None:
    """B is 0: logits equal the base's bit for bit; A does not depend on the layout."""
    tokens = torch.load(Path(context["root"]) / "models" / "qwen3_moe" / "reference.pt")["tokens"]
    for name in ("qwen3_tied", "qwen3_moe"):
        source = Path(context["root"]) / "models" / name
        plain = forward_logits(build(make_args(source))[0], tokens)
        model, *_ = build(make_args(source, flags=LORA_FLAGS))
        assert torch.equal(forward_logits(model, tokens), plain)
        adapters = dict(gather_adapters(model))
        assert all((tensor == 0).all() == name.endswith("lora_B") for name, tensor in adapters.items())
        torch.save(adapters, Path(context["root"]) / f"new-{name}.pt")


def scenario_new_adapters_by_layout(context: dict[str, str]) -> None:
    """Two processes: as `scenario_new_adapters_change_nothing` left them."""
    etp2 = f"{TP2} --sequence-parallel --expert-tensor-parallel-size 2"
    for name, flags in (("qwen3_tied", TP2), ("qwen3_moe", etp2), ("qwen3_moe", EP2)):
        model, *_ = build(make_args(Path(context["root"]) / "models" / name, flags=f"{LORA_FLAGS} {flags}"))
        assert_same_weights(torch.load(Path(context["root"]) / f"new-{name}.pt"), dict(gather_adapters(model)))


def scenario_bf16(context: dict[str, str]) -> None:
    """Trains in bf16 with float32 main copies; merged in float32 and rounded once; the base does not change."""
    source = Path(context["root"]) / "models" / "qwen3"
    args = make_args(source, flags="--lora-rank 4 --bf16 --recompute-granularity full --recompute-method uniform "
                     "--recompute-num-layers 1")  # fmt: skip
    model, optimizer, scheduler, _ = build(args)
    before = {name: weight.clone() for name, weight in named_params_and_buffers(args, model)}
    losses = [train_step(args, model, optimizer, scheduler, 0)[0] for _ in range(6)]
    assert losses[-1] < losses[0] - 0.1, losses
    assert_same_weights(before, dict(named_params_and_buffers(args, model)))
    merged = dict(named for chunk in HfWeightIterator(args, model).chunks() for named in chunk)
    adapters, base = dict(gather_adapters(model)), read_tensors(source)
    name = "model.layers.2.mlp.up_proj"
    delta = adapters[f"{name}.lora_B"].float() @ adapters[f"{name}.lora_A"].float() * 2.0
    expected = (base[f"{name}.weight"].bfloat16().float() + delta).bfloat16()
    assert torch.equal(merged[f"{name}.weight"], expected) and not torch.equal(expected, base[f"{name}.weight"])


def scenario_targets(context: dict[str, str]) -> None:
    """Short names and whole ones where a short name would also match layers without an adapter; names of Megatron;
    a name that matches nothing."""
    root = Path(context["root"])
    targets = {
        "q_proj v_proj": {"q_proj", "v_proj"},
        "linear_qkv linear_fc2": {"q_proj", "k_proj", "v_proj", "down_proj"},
        "experts": {"gate_proj", "up_proj", "down_proj"},
    }
    for names, expected in targets.items():
        args = make_args(root / "models" / "qwen2_moe", flags=f"--lora-rank 2 --lora-targets {names}")
        model, *_ = build(args)
        modules = {name.rpartition(".lora_")[0] for name, _ in named_adapters(model)}
        assert {module.rpartition(".")[2] for module in modules} == expected
        save_adapter(args, root / "out" / f"targets {names}", model)
        config = json.loads((root / "out" / f"targets {names}" / "adapter_config.json").read_text())
        # the dense layer and the shared expert have modules of these names too
        assert set(config["target_modules"]) == (modules if names == "experts" else expected)
        assert (config["r"], config["lora_alpha"], config["peft_type"]) == (2, 4.0, "LORA")
    args = make_args(root / "models" / "qwen3", flags="--lora-rank 2 --lora-targets q_proj gate_up_proj")
    expect(ValueError, "no linear layer called gate_up_proj", lambda: build(args))


def train_and_save(args: Any) -> list[Any]:
    """Six steps with a save after the third; the steps after it and the adapters at the end."""
    model, optimizer, scheduler, _ = build(args)
    for step in range(3):
        train_step(args, model, optimizer, scheduler, step)
    save_checkpoint(args, 1, model, optimizer, scheduler)
    return continue_training(args, model, optimizer, scheduler)


def continue_training(args: Any, model: Any, optimizer: Any, scheduler: Any) -> list[Any]:
    steps = [train_step(args, model, optimizer, scheduler, step) for step in range(3, 6)]
    return [steps, {name: tensor.clone() for name, tensor in gather_adapters(model)}]


def resume(args: Any) -> list[Any]:
    model, optimizer, scheduler, iteration = build(args)
    assert iteration == 1
    return continue_training(args, model, optimizer, scheduler)


def check_resume(context: dict[str, str], name: str, saved: str, loaded: str) -> None:
    """Exact under the same layout, close under another; what is saved is adapters and their optimiser state."""
    root = Path(context["root"])
    directory = root / "out" / f"ckpt-{name}-{dist.get_world_size()}-{'-'.join(saved.split())}"
    lora = LORA_FLAGS if "--lora-targets" in saved else f"{LORA_FLAGS} --lora-load {root / 'adapters' / name}"
    steps, adapters = train_and_save(make_args(root / "models" / name, save=str(directory), flags=f"{lora} {saved}"))
    again, resumed = resume(make_args(root / "models" / name, load=str(directory), flags=f"{LORA_FLAGS} {loaded}"))
    if saved == loaded:
        assert again == steps
        assert_same_weights(adapters, resumed)
    for before, after in zip(steps, again, strict=True):
        assert abs(before[0] - after[0]) < 1e-4 and before[2] == after[2], (steps, again)
    # values, float32 main copies and two moments; the format adds a few KiB to each
    numbers = sum(tensor.numel() for tensor in adapters.values())
    size = sum(file.stat().st_size for file in (directory / "iter_0000001").glob("*.distcp"))
    assert 4 * 4 * numbers < size < 4 * 4 * numbers + 300_000 + 16_000 * len(adapters), (size, numbers)


def scenario_refuses(context: dict[str, str]) -> None:
    """A checkpoint of other adapters, or of whole weights, or adapters where whole weights are wanted."""
    root = Path(context["root"])
    source, saved = root / "models" / "qwen3", str(root / "out" / "refused")
    train_and_save(make_args(source, save=saved, flags=ATTENTION_FLAGS))

    def refuse(text: str, flags: str, model: Path = source, load: str = saved) -> None:
        expect(ValueError, text, lambda: build(make_args(model, load=load, flags=flags)))

    attention = "--lora-targets q_proj v_proj o_proj"
    refuse("--lora-rank is 4 there and 2 here", f"--lora-rank 2 --lora-alpha 6 {attention}")
    refuse("--lora-alpha is 6 there and 8 here", f"--lora-rank 4 {attention}")
    refuse("--lora-targets is o_proj q_proj v_proj there and q_proj here",
           "--lora-rank 4 --lora-alpha 6 --lora-targets q_proj")  # fmt: skip
    other = root / "merged" / "qwen3"
    refuse(f"the base is {source} (fingerprint", ATTENTION_FLAGS, model=other)
    refuse(f"and {other} (fingerprint", ATTENTION_FLAGS, model=other)
    refuse("holds LoRA adapters (--lora-rank 4 --lora-alpha 6", "")
    whole = str(root / "out" / "whole")
    train_and_save(make_args(source, save=whole))
    refuse("holds whole weights, not LoRA adapters", ATTENTION_FLAGS, load=whole)
    adapter = root / "adapters" / "qwen3"
    refuse("r is 4, --lora-rank is 8", f"--lora-rank 8 --lora-alpha 6 --lora-load {adapter}", load="")
    refuse("matrices that --lora-targets does not name", f"{ATTENTION_FLAGS} --lora-load {adapter}", load="")


def scenario_other_base(context: dict[str, str]) -> None:
    """A reference that is another model has its own copy of the weights; the actor's base comes back, and engines get
    the actor's weights from host memory (as when the trainer sleeps)."""
    from slime.backends.megatron_utils.actor_training import ActorTraining

    root = Path(context["root"])
    source, other, adapter = (root / kind / "qwen3" for kind in ("models", "merged", "adapters"))
    args = make_args(source, flags=f"{LORA_FLAGS} --lora-load {adapter} --offload-train")
    model, optimizer, scheduler, _ = build(args)
    actor = ActorTraining(args, model, optimizer, scheduler, -1)
    actor.load_other_checkpoint("ref", str(source))
    actor.load_other_checkpoint("teacher", str(other))
    expected = {tag: torch.load(root / kind / "qwen3" / "reference.pt") for tag, kind in
                {"ref": "models", "actor": "merged", "teacher": "merged"}.items()}  # fmt: skip
    for tag in ("ref", "actor", "teacher", "ref", "actor"):
        actor._switch_weights(tag)
        logits = forward_logits(model, expected[tag]["tokens"])
        assert (logits[..., : args.vocab_size] - expected[tag]["logits"]).abs().max() < 1e-4, tag
    for _, weight in named_params_and_buffers(args, model):
        weight.data.zero_()
    chunks = HfWeightIterator(args, model).chunks(actor.actor_weights())
    sent = dict(named for chunk in chunks for named in chunk)
    for key, tensor in merged_tensors(source, adapter).items():
        torch.testing.assert_close(sent[key], tensor, rtol=2e-7, atol=1e-8)


def scenario_critic(context: dict[str, str]) -> None:
    """PPO: beside an actor with adapters, a critic that is trained whole."""
    from slime.utils.arguments import parse_megatron_role_args

    source = Path(context["root"]) / "models" / "qwen3"
    args = make_args(source, flags=f"{ATTENTION_FLAGS} --advantage-estimator ppo")
    init_layout(args)
    critic, *_ = initialize_model_and_optimizer(parse_megatron_role_args(args, None, "critic"), "critic")
    assert all(parameter.requires_grad for parameter in critic[0].parameters()) and not list(named_adapters(critic))
    actor, *_ = initialize_model_and_optimizer(args, "actor")
    trained = [name for name, parameter in actor[0].named_parameters() if parameter.requires_grad]
    assert len(trained) == len(list(named_adapters(actor))) == 4 * 3 * 2


RESUMES = {
    "one process": (1, "qwen3_moe", "", ""),
    "dp2": (2, "qwen3", "", ""),
    "tp2 to pp2 vpp2": (2, "qwen3", TP2, PP2_VPP2),
    "delta net tp2 to pp2": (2, "qwen3_5", TP2, PP2),
    "fused tp2 to pp2": (2, "glm4", TP2, PP2),
    "ep2 to dp2": (2, "qwen3_moe", EP2, ""),
    "experts alone": (2, "qwen3_moe", f"{EP2} --lora-targets experts", f"{EP2} --lora-targets experts"),
    "experts alone, ep2 to dp2": (2, "qwen3_moe", f"{EP2} --lora-targets experts", "--lora-targets experts"),
    "attention alone, ep2 to dp2": (2, "qwen3_moe", f"{EP2} --lora-targets q_proj", "--lora-targets q_proj"),
}
assert RANK == 4  # ATTENTION_FLAGS say so
