"""Three optimiser steps on adapters under any layout, compared with those of one process.

As `layout_matrix`, but what is compared are the adapters' gradients and values, whole, by name; and the base may not
change. The adapters start from a PEFT folder with random B, so that A has gradients from the first step on.
"""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from layout_matrix import (
    RUN_FLAGS,
    SMALLEST,
    STEPS,
    Case,
    Outcome,
    compare_outcomes,
    gather_reduced_shards,
    rank_rollout,
)
from lora_models import LORA_FLAGS
from megatron_tiny import MOE_FLAGS, init_layout
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class LoraCase(Case):
    """`adapter`: the folder that the adapters start from; None: new ones."""

    adapter: str | None = None


def lora_args(case: LoraCase, model_dir: str) -> Namespace:
    from slime.utils.arguments import parse_args

    moe = MOE_FLAGS if case.model == "qwen3_moe" else ""
    load = f"--lora-load {case.adapter}" if case.adapter else ""
    devices = f"--actor-num-gpus-per-node {dist.get_world_size()}"
    flags = f"{RUN_FLAGS} {moe} {LORA_FLAGS} {load} {case.layout} {case.batching}"
    return parse_args(argv=f"--hf-checkpoint {model_dir} {devices} {flags}".split())


def run_case(case: LoraCase, model_dir: str) -> Outcome:
    """Reference (the base) and own log-probs, advantages, three optimiser steps, by the trainer's own functions."""
    from slime.backends.megatron_utils.actor_training import ActorTraining
    from slime.backends.megatron_utils.lora.gather import gather_adapters
    from slime.backends.megatron_utils.optimizer import initialize_model_and_optimizer
    from slime.backends.megatron_utils.update_weight.common import named_params_and_buffers

    args = lora_args(case, model_dir)
    init_layout(args)
    model, optimizer, scheduler, _ = initialize_model_and_optimizer(args, "actor")
    base = {name: weight.clone() for name, weight in named_params_and_buffers(args, model)}
    data = rank_rollout(args, case, model)
    recorder = AdapterGradientRecorder(model, optimizer)
    actor = ActorTraining(args, model, recorder, scheduler, -1)
    actor.load_other_checkpoint("ref", model_dir)
    metrics = actor.train(0, data, None)
    for name, weight in named_params_and_buffers(args, model):
        assert torch.equal(weight, base[name]) and not weight.requires_grad, f"{name} of the frozen base changed"
    parameters = {name: tensor.clone() for name, tensor in gather_adapters(model)}
    return Outcome(metrics, recorder.gradients, parameters)


class AdapterGradientRecorder:
    """A Megatron optimizer that keeps a copy of every step's whole adapter gradients before they are clipped."""

    def __init__(self, model: Sequence[Any], inner: Any) -> None:
        self.model, self.inner = model, inner
        self.gradients: list[dict[str, Tensor]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def prepare_grads(self) -> bool:
        from slime.backends.megatron_utils.lora.gather import gather_adapters
        from slime.backends.megatron_utils.lora.weights import adapter_parameters

        for chunk in self.model:
            for buffer in chunk.buffers + chunk.expert_parallel_buffers:
                gather_reduced_shards(buffer)
        gradients = {entry.name: entry.parameter.main_grad for entry in adapter_parameters(self.model)}
        self.gradients.append({name: tensor.clone() for name, tensor in gather_adapters(self.model, gradients)})
        return self.inner.prepare_grads()


def save_reference(case: LoraCase, model_dir: str, path: str) -> None:
    """One process, one sample per micro-batch; every adapter must have a gradient to compare."""
    outcome = run_case(case, model_dir)
    assert len(outcome.metrics) == len(outcome.gradients) == STEPS
    largest = {name: max(step[name].abs().max() for step in outcome.gradients) for name in outcome.parameters}
    without = [name for name, value in largest.items() if value < SMALLEST]
    # some experts may get no tokens
    assert all(".experts." in name for name in without) and len(without) < 0.2 * len(largest), without
    # the reference is the base, which loaded adapters differ from
    assert outcome.metrics[0]["train/kl_loss"] > 0
    torch.save(outcome, path)


def compare(case: LoraCase, model_dir: str, path: str) -> None:
    """Run the case and compare with the reference; AssertionError naming the step and the tensor that differs."""
    compare_outcomes(run_case(case, model_dir), torch.load(path, weights_only=False), case.tolerance)
