"""Training of models that no Hugging Face directory holds: one process initialises and saves one, layouts load it."""

from __future__ import annotations

from typing import Any

import layout_matrix
import torch
from layout_matrix import Case
from torch import Tensor

IGNORED = ("train/lr-pg_", "train/step")


def train_from(case: Case, model_dir: str, folder: str, save: bool = False) -> tuple[list[dict[str, Any]], Any, Any]:
    """(metrics of three supervised steps, args, model) from the checkpoint in `folder`, which `save` makes first."""
    from slime.backends.megatron_utils.checkpoint import load_checkpoint, save_checkpoint
    from slime.backends.megatron_utils.data import get_data_iterator
    from slime.backends.megatron_utils.model import train
    from slime.backends.megatron_utils.optimizer import setup_model_and_optimizer

    args = layout_matrix.case_args(case, model_dir)
    args.loss_type, args.save, args.no_save_optim, args.ckpt_step = "sft_loss", folder, True, None
    layout_matrix.init_layout(args)
    model, optimizer, scheduler = setup_model_and_optimizer(args)
    if save:
        save_checkpoint(args, 0, model, optimizer, scheduler)
    load_checkpoint(args, model, None, None, folder, weights_only=True)
    optimizer.reload_model_params()
    data = layout_matrix.rank_rollout(args, case, model)
    iterator, counts = get_data_iterator(data), data["num_microbatches"]
    return train(args, 0, model, optimizer, scheduler, iterator, counts, data["global_batch_sizes"]), args, model


def save_reference(case: Case, model_dir: str, folder: str) -> list[dict[str, Any]]:
    metrics, args, model = train_from(case, model_dir, folder, save=True)
    torch.save({"metrics": metrics, "biases": biases(args, model)}, f"{folder}/reference.pt")
    return metrics


def compare(case: Case, model_dir: str, folder: str) -> None:
    """Metrics of every step, gradient norms among them, and the expert biases equal those of one process."""
    expected = torch.load(f"{folder}/reference.pt", weights_only=False)
    metrics, args, model = train_from(case, model_dir, folder)
    for step, (ours, reference) in enumerate(zip(metrics, expected["metrics"], strict=True)):
        for name, value in ours.items():
            if not name.startswith(IGNORED):
                allowed = 1e-6 + 1e-5 * abs(reference[name])
                assert abs(value - reference[name]) <= allowed, f"step {step}: {name} {value}, not {reference[name]}"
    for name, bias in biases(args, model).items():
        assert torch.equal(bias, expected["biases"][name]), f"{name}: {bias}, not {expected['biases'][name]}"


def biases(args: Any, model: Any) -> dict[str, Tensor]:
    from slime.backends.megatron_utils.update_weight.common import named_params_and_buffers

    named = named_params_and_buffers(args, model)
    return {name: tensor.clone() for name, tensor in named if name.endswith("expert_bias")}
