"""Training of models that no Hugging Face directory holds: one process initialises and saves one, layouts load it."""

from __future__ import annotations

from typing import Any

import layout_matrix
import torch
from layout_matrix import Case

from slime.utils.dry_run.parameters import count_rank_parameters

IGNORED = ("train/lr-pg_", "train/step")


def train_from(case: Case, model_dir: str, folder: str, save: bool = False) -> list[dict[str, Any]]:
    """The metrics of three supervised steps from the checkpoint in `folder`, which `save` makes first."""
    from megatron.core import parallel_state

    from slime.backends.megatron_utils.checkpoint import load_checkpoint, save_checkpoint
    from slime.backends.megatron_utils.data import get_data_iterator
    from slime.backends.megatron_utils.model import train
    from slime.backends.megatron_utils.optimizer import setup_model_and_optimizer

    args = layout_matrix.case_args(case, model_dir)
    args.loss_type, args.save, args.no_save_optim, args.ckpt_step = "sft_loss", folder, True, None
    layout_matrix.init_layout(args)
    model, optimizer, scheduler = setup_model_and_optimizer(args)
    held = sum(parameter.numel() for chunk in model for parameter in chunk.parameters())
    assert held == count_rank_parameters(args, parallel_state.get_pipeline_model_parallel_rank()).total
    if save:
        save_checkpoint(args, 0, model, optimizer, scheduler)
    load_checkpoint(args, model, None, None, folder, weights_only=True)
    optimizer.reload_model_params()
    data = layout_matrix.rank_rollout(args, case, model)
    iterator, counts = get_data_iterator(data), data["num_microbatches"]
    return train(args, 0, model, optimizer, scheduler, iterator, counts, data["global_batch_sizes"])


def save_reference(case: Case, model_dir: str, folder: str) -> None:
    metrics = train_from(case, model_dir, folder, save=True)
    assert metrics[0]["train/grad_norm"] > 0
    torch.save(metrics, f"{folder}/reference.pt")


def compare(case: Case, model_dir: str, folder: str) -> None:
    """Metrics of every step, gradient norms among them, equal those of one process."""
    expected = torch.load(f"{folder}/reference.pt", weights_only=False)
    for step, (ours, reference) in enumerate(zip(train_from(case, model_dir, folder), expected, strict=True)):
        for name, value in ours.items():
            if not name.startswith(IGNORED):
                allowed = 1e-6 + 1e-5 * abs(reference[name])
                assert abs(value - reference[name]) <= allowed, f"step {step}: {name} {value}, not {reference[name]}"
