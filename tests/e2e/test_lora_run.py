"""`train.py` with LoRA: a colocated GRPO run that starts from an adapter and exports it."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.support.tiny_run import tiny_run
from tests.support.train_cli import TrainCli

RUN_TIMEOUT_S = 420
RANK, ALPHA = 4, 8
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."


def write_adapter(model: Path, folder: Path) -> Path:
    """A random adapter of the attention's output and the MLP's gate."""
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for name, weight in load_file(model / "model.safetensors").items():
        if name.endswith(("o_proj.weight", "gate_proj.weight")):
            module = f"{PREFIX}{name.removesuffix('.weight')}"
            outputs, inputs = weight.shape
            tensors[f"{module}.lora_A.weight"] = torch.randn(RANK, inputs, generator=generator) / inputs**0.5
            tensors[f"{module}.lora_B.weight"] = torch.randn(outputs, RANK, generator=generator) * 0.02
    folder.mkdir()
    save_file(tensors, folder / WEIGHTS)
    (folder / "adapter_config.json").write_text(f'{{"r": {RANK}, "lora_alpha": {ALPHA}}}')
    return folder


def test_grpo_trains_an_adapter(ray_cluster: str, train_cli: TrainCli, tiny_model_dir: Path, tmp_path: Path) -> None:
    """The engine serves base and adapter merged, before and after training, bit for bit what the trainer has; the
    reference is the base; what is saved is the adapter."""
    start = write_adapter(tiny_model_dir, tmp_path / "start")
    flags = tiny_run(
        tiny_model_dir, tmp_path, check_weight_update_equal=True, lora_rank=RANK, lora_alpha=ALPHA,
        lora_targets=["o_proj", "gate_proj"], lora_load=start, lr=1e-2, save=tmp_path / "ckpt", save_interval=2,
        save_hf=tmp_path / "merged", lora_save_adapter=tmp_path / "adapter",
    )  # fmt: skip
    result = train_cli.run(*flags, timeout=RUN_TIMEOUT_S).check()

    # the engine's log-probs are those of base and adapter in the trainer, also after the first update
    for rollout in (0, 1):
        assert result.series("train/train_rollout_logprob_abs_diff")[rollout] < 5e-5
    assert result.series("train/ppo_kl")[0] == 0.0 and result.series("train/kl_loss")[0] > 0.0
    assert all(value > 0 for value in result.series("train/grad_norm").values())

    base, merged = (load_file(folder / "model.safetensors") for folder in (tiny_model_dir, tmp_path / "merged"))
    before, after = load_file(start / WEIGHTS), load_file(tmp_path / "adapter" / WEIGHTS)
    assert before.keys() == after.keys() and not any(torch.equal(before[name], after[name]) for name in before)
    for name, weight in base.items():
        module = f"{PREFIX}{name.removesuffix('.weight')}"
        if f"{module}.lora_A.weight" in after:
            weight = weight + ALPHA / RANK * after[f"{module}.lora_B.weight"] @ after[f"{module}.lora_A.weight"]
            torch.testing.assert_close(merged[name], weight, rtol=1e-6, atol=1e-8)
        else:
            assert torch.equal(merged[name], weight), name
    saved = sum(file.stat().st_size for file in (tmp_path / "ckpt" / "iter_0000001").glob("*.distcp"))
    assert saved < (tiny_model_dir / "model.safetensors").stat().st_size
