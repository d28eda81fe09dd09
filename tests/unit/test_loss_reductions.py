"""The reductions of docs/losses.md, with the numbers of its worked example."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from test_losses import make_args

from slime.backends.megatron_utils.loss import loss_function

DOCS = (Path(__file__).resolve().parents[2] / "docs" / "losses.md").read_text()
LOSSES = [[4.0], [1.0, 1.0, 1.0], [2.0, 9.0, 4.0], [3.0, 3.0]]
MASKS = [[1], [1, 1, 1], [1, 0, 1], [1, 1]]
EXECUTIONS = ["A", "B", "C", "C"]
LAYOUTS = ([[0, 1, 2, 3]], [[0], [1], [2], [3]], [[3, 0], [2, 1]])


def token_losses(
    args: Namespace, batch: dict[str, Any], logits: torch.Tensor, reduce: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A user's loss: the numbers of the example."""
    loss = reduce(torch.cat(batch["token_losses"]))
    return loss, {"loss": loss}


def step_loss(args: Namespace, layout: Sequence[Sequence[int]], samples: Sequence[int] = (0, 1, 2, 3)) -> float:
    """What Megatron's schedule makes of the micro-batches of one step in one process."""
    executions = len({EXECUTIONS[i] for i in samples})
    sums = {e: float(sum(sum(MASKS[i]) for i in samples if EXECUTIONS[i] == e)) for e in EXECUTIONS}
    total, tokens = 0.0, 0
    for indices in layout:
        batch = {
            "token_losses": [torch.tensor(LOSSES[i]) for i in indices],
            "loss_masks": [torch.tensor(MASKS[i]) for i in indices],
            "total_lengths": [len(LOSSES[i]) + 1 for i in indices],
            "response_lengths": [len(LOSSES[i]) for i in indices],
            "rollout_mask_sums": [torch.tensor(sums[EXECUTIONS[i]]) for i in indices],
        }
        loss, normalizer, _ = loss_function(args, batch, len(layout), executions, torch.zeros(1))
        tokens += int(normalizer)
        total += loss.item() if args.calculate_per_token_loss else loss.item() / int(normalizer) / len(layout)
    return total / tokens if args.calculate_per_token_loss else total


def reduction_args(**changes: Any) -> Namespace:
    return make_args(loss_type="custom_loss", custom_loss_function_path=f"{__name__}.token_losses", **changes)


@pytest.mark.parametrize(
    ("settings", "flag", "result"),
    [
        ({}, "token mean per rollout (default)", 8 / 3),
        ({"calculate_per_token_loss": True}, "`--calculate-per-token-loss`", 19 / 8),
        ({"constant_loss_denominator": 10}, "`--constant-loss-denominator 10`", 1.9 / 3),
    ],
)
def test_the_worked_example(settings: dict[str, Any], flag: str, result: float) -> None:
    """X6, X7: the number in the documentation, in every layout over micro-batches."""
    for layout in LAYOUTS:
        assert step_loss(reduction_args(**settings), layout) == pytest.approx(result, rel=1e-6)
    [line] = [line for line in DOCS.splitlines() if flag in line and " = " in line]
    assert f"= {result:.4f} |" in line


def test_the_two_samples_of_the_case() -> None:
    """X7: losses [4] and [1, 1, 1]: 2.5 per sample, 7/4 per token."""
    for layout in ([[0, 1]], [[1], [0]]):
        assert step_loss(reduction_args(), layout, (0, 1)) == pytest.approx(2.5)
        assert step_loss(reduction_args(calculate_per_token_loss=True), layout, (0, 1)) == pytest.approx(1.75)
    assert "2.5\nand 7/4 = 1.75" in DOCS
