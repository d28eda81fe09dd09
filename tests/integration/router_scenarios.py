"""Scenarios of `test_routers`."""

from __future__ import annotations

from typing import Any

import layout_matrix
import torch
import torch.distributed as dist
from layout_matrix import Case
from torch import Tensor

AUX = "--moe-router-load-balancing-type aux_loss"
PADDED = "--use-dynamic-batch-size --max-tokens-per-gpu 60 --data-pad-size-multiplier 16"


def build(case: Case, model_dir: str) -> tuple[Any, ...]:
    """(args, model, optimizer, scheduler, this rank's data) for supervised steps."""
    from slime.backends.megatron_utils.optimizer import initialize_model_and_optimizer

    args = layout_matrix.case_args(case, model_dir)
    args.loss_type = "sft_loss"
    layout_matrix.init_layout(args)
    model, optimizer, scheduler, _ = initialize_model_and_optimizer(args, "actor")
    return args, model, optimizer, scheduler, layout_matrix.rank_rollout(args, case, model)


def routers(model: Any) -> list[Any]:
    from megatron.core.transformer.moe.router import TopKRouter

    return [module for chunk in model for module in chunk.modules() if isinstance(module, TopKRouter)]


def step(args: Any, model: Any, optimizer: Any, scheduler: Any, data: dict[str, Any]) -> dict[str, float]:
    from slime.backends.megatron_utils.data import get_data_iterator
    from slime.backends.megatron_utils.model import train

    sizes = data["num_microbatches"][:1], data["global_batch_sizes"][:1]
    return train(args, 0, model, optimizer, scheduler, get_data_iterator(data), *sizes)[0]


def scenario_formulas(model_dir: str) -> None:
    """What each loss adds to the gradient of the last router's weight, whose input no auxiliary loss changes."""
    balance, z = 0.1, 0.02
    per_sequence = AUX.replace("aux_loss", "seq_aux_loss")
    plain = _last_router(model_dir, "")
    for flags, coefficient, formula, name in (
        (f"{AUX} --moe-aux-loss-coeff {balance}", balance, _balancing_loss, "load_balancing"),
        (f"{per_sequence} --moe-aux-loss-coeff {balance}", balance, _balancing_loss, "seq_load_balancing"),
        (f"--moe-z-loss-coeff {z}", z, _z_loss, "z"),
    ):
        ours = _last_router(model_dir, flags)
        weight = ours["weight"].double().requires_grad_()
        batches = [tokens.double() @ weight.T for tokens in ours["inputs"]]
        if name.startswith("seq"):
            parts = zip(batches, ours["lengths"], strict=True)
            batches = [sequence for logits, lengths in parts for sequence in logits.split(lengths)]
        count = torch.tensor(float(len(batches)))
        dist.all_reduce(count)
        loss = sum(formula(logits) for logits in batches) / count
        (gradient,) = torch.autograd.grad(coefficient * loss, weight)
        dist.all_reduce(gradient)
        added = (ours["gradient"] - plain["gradient"]).double()
        difference = ((added - gradient).abs().max() / gradient.abs().max()).item()
        assert difference < 1e-3, f"{flags}: differs by {difference} of its largest element"
        value = torch.tensor(float(loss))
        dist.all_reduce(value)
        assert ours["metrics"][f"train/{name}_loss"] > 0 and float(value) > 0


def _last_router(model_dir: str, flags: str) -> dict[str, Any]:
    """Gradient of the last router's weight in one step, and its inputs without padding, per micro-batch."""
    args, model, optimizer, scheduler, data = build(Case("qwen3_moe", f"--clip-grad 0 {flags}", PADDED), model_dir)
    router = routers(model)[-1]
    weight = router.weight.detach().clone()
    inputs: list[Tensor] = []

    def note(_: Any, arguments: tuple[Any, ...], __: Any) -> None:
        hidden, padding = arguments
        inputs.append(hidden[~padding].detach().clone())
        assert padding.any(), "the case should have padding"

    router.register_forward_hook(note)
    recorder = layout_matrix.GradientRecorder(args, model, optimizer)
    metrics = step(args, model, recorder, scheduler, data)
    name = next(name for name in recorder.gradients[0] if name.endswith("layers.3.mlp.gate.weight"))
    micro_batches = data["micro_batch_indices"][: len(inputs)]
    lengths = [[len(data["tokens"][i]) for i in indices] for indices in micro_batches]
    gradient = recorder.gradients[0][name]
    return {"gradient": gradient, "inputs": inputs, "lengths": lengths, "weight": weight, "metrics": metrics}


def _balancing_loss(logits: Tensor) -> Tensor:
    """E · Σ f_e P_e of a micro-batch."""
    probabilities = logits.softmax(dim=1)
    chosen = torch.zeros_like(logits).scatter(1, probabilities.topk(2).indices, 1.0)
    return logits.shape[1] * (chosen.mean(dim=0) / 2 * probabilities.mean(dim=0)).sum()


def _z_loss(logits: Tensor) -> Tensor:
    return logits.logsumexp(dim=1).square().mean()


def scenario_expert_bias(model_dir: str, folder: str, flags: str) -> None:
    from slime.backends.megatron_utils.checkpoint import load_checkpoint, save_checkpoint
    from slime.backends.megatron_utils.data import get_data_iterator
    from slime.backends.megatron_utils.loss import get_log_probs_and_entropy
    from slime.backends.megatron_utils.model import forward_only
    from slime.backends.megatron_utils.update_weight.common import named_params_and_buffers
    from slime.backends.megatron_utils.weights_backuper import WeightsBackuper

    case = Case("deepseek_v3", f"{flags} --bf16", PADDED)
    args, model, optimizer, scheduler, data = build(case, model_dir)
    copies = WeightsBackuper(lambda: named_params_and_buffers(args, model))
    copies.backup("start")
    found = routers(model)
    start = [router.expert_bias.clone() for router in found]
    counts = [torch.zeros(8) for _ in found]

    def count_chosen(router: Any, arguments: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        if router.training:
            counts[found.index(router)] += output[1][~arguments[1][:, 0]].sum(dim=0)

    def unchanged(biases: list[Tensor]) -> bool:
        return all(torch.equal(router.expert_bias, bias) for router, bias in zip(found, biases, strict=True))

    for router in found:
        router.register_forward_hook(count_chosen)
    forward_only(get_log_probs_and_entropy, args, model, get_data_iterator(data), data["num_microbatches"])
    assert unchanged(start), "a log-prob pass must not move the bias"
    step(args, model, optimizer, scheduler, data)
    for router, count, before in zip(found, counts, start, strict=True):
        expected = before + 0.05 * torch.sign(count.mean() - count)
        assert torch.equal(router.expert_bias, expected) and count.sum() > 0
    moved = [router.expert_bias.clone() for router in found]
    assert found and not unchanged(start)

    copies.backup("moved")
    copies.restore("start")
    assert unchanged(start)
    copies.restore("moved")
    assert unchanged(moved) and all(router.expert_bias.dtype is torch.float32 for router in found)

    args.save, args.no_save_optim = folder, True
    save_checkpoint(args, 0, model, optimizer, scheduler)
    args.custom_megatron_before_train_step_hook_path = "train_scenarios.poison_first_step"
    assert step(args, model, optimizer, scheduler, data)["train/skipped_steps"] == 1
    assert unchanged(moved), "a step that is skipped must not move the bias"
    copies.restore("start")
    load_checkpoint(args, model, None, None, folder, weights_only=True)
    assert unchanged(moved)
