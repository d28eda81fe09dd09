"""Three optimiser steps of one rollout under any layout, and their comparison with those of one process.

Gradients and parameters are compared as full Hugging Face tensors, one by one. Adam's epsilon is large: with the usual
one an element whose gradient is rounding noise moves by a full learning rate in a random direction.
"""

from __future__ import annotations

import contextlib
import dataclasses
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron_tiny import MOE_FLAGS, init_layout
from tiny_hf import VOCAB
from torch import Tensor
from vision_tiny import add_images

from slime.utils.dp_schedule import build_dp_schedule

STEPS = 3
BATCH = 8  # samples per step
# (total, response) of a step's samples: nothing divides, and the long prompts put whole responses on one CP rank
LENGTHS = [(13, 7), (40, 3), (7, 1), (27, 19), (9, 5), (37, 30), (3, 2), (23, 4)]
MASKED = 4  # the sample of each step that is masked out as a whole
TOLERANCE = 1e-5
SMALLEST = 1e-5  # of a tensor's largest element, that its differences are measured by

RUN_FLAGS = f"""
    --debug-train-only --disable-rollout-global-dataset --num-rollout 1 --rollout-batch-size {STEPS * BATCH}
    --n-samples-per-prompt 1 --global-batch-size {BATCH} --lr 1e-2 --lr-decay-style constant --weight-decay 0.1
    --adam-eps 1e-3 --clip-grad 0.5 --rollout-max-response-len 64 --rollout-temperature 0.9
    --entropy-coef 0.01 --use-kl-loss --kl-loss-coef 0.1 --kl-loss-type low_var_kl --eps-clip-high 0.28
    --log-probs-chunk-size 7 --data-pad-size-multiplier 1
"""


@dataclasses.dataclass(frozen=True)
class Case:
    """How a rollout is laid out.

    Attributes:
        model: a name of `tiny_hf.MODELS`.
        layout: flags that split the model over ranks.
        batching: flags of micro-batches, padding and recompute.
        permuted: the samples of each step in another order.
        rollout: "plain", or "half_empty": every second sample has no response, so with two data-parallel ranks and
            micro-batches in order, one has no response token; or "images" (`vision_tiny.add_images`).
        tolerance: largest relative difference; a family with longer sums in float32 has more rounding.
    """

    model: str
    layout: str = ""
    batching: str = "--micro-batch-size 1"
    permuted: bool = False
    rollout: str = "plain"
    tolerance: float = TOLERANCE


@dataclasses.dataclass
class Outcome:
    """[step] metrics and gradients, and the parameters at the end; tensors by Hugging Face name."""

    metrics: list[dict[str, float]]
    gradients: list[dict[str, Tensor]]
    parameters: dict[str, Tensor]


def run_case(case: Case, model_dir: str) -> Outcome:
    """Reference and own log-probs, advantages and three optimiser steps, by the trainer's own functions."""
    from megatron.core import parallel_state as mpu

    from slime.backends.megatron_utils.data import get_data_iterator
    from slime.backends.megatron_utils.loss import compute_advantages_and_returns, get_log_probs_and_entropy
    from slime.backends.megatron_utils.model import forward_only, train
    from slime.backends.megatron_utils.moe.routing_replay import RoutingReplay
    from slime.backends.megatron_utils.optimizer import initialize_model_and_optimizer
    from slime.backends.megatron_utils.update_weight.hf_weight_iterator import HfWeightIterator

    args = case_args(case, model_dir)
    init_layout(args)
    model, optimizer, scheduler, _ = initialize_model_and_optimizer(args, "actor")
    data = rank_rollout(args, case, model)
    iterator, counts = get_data_iterator(data), data["num_microbatches"]
    replay = RoutingReplay(args, model) if args.use_routing_replay else None
    data |= forward_only(get_log_probs_and_entropy, args, model, iterator, counts, "ref_")
    with replay.record() if replay else contextlib.nullcontext():
        data |= forward_only(get_log_probs_and_entropy, args, model, iterator, counts, replay=replay)
    if mpu.is_pipeline_last_stage(ignore_virtual=True):
        compute_advantages_and_returns(args, data)
    recorder = GradientRecorder(args, model, optimizer)
    sizes = data["global_batch_sizes"]
    metrics = train(args, 0, model, recorder, scheduler, iterator, counts, sizes, replay=replay)
    parameters = _named(HfWeightIterator(args, model).chunks())
    return Outcome(metrics, recorder.gradients, parameters)


def case_args(case: Case, model_dir: str) -> Namespace:
    from slime.utils.arguments import parse_args

    moe = MOE_FLAGS if case.model == "qwen3_moe" else ""
    devices = f"--actor-num-gpus-per-node {dist.get_world_size()}"
    flags = f"{RUN_FLAGS} {moe} {case.layout} {case.batching}"
    return parse_args(argv=f"--hf-checkpoint {model_dir} {devices} {flags}".split())


class GradientRecorder:
    """A Megatron optimizer that keeps a copy of every step's full gradients before they are clipped."""

    def __init__(self, args: Namespace, model: Sequence[Any], inner: Any) -> None:
        self.args, self.model, self.inner = args, model, inner
        self.gradients: list[dict[str, Tensor]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def prepare_grads(self) -> bool:
        from slime.backends.megatron_utils.update_weight.common import named_params_and_buffers
        from slime.backends.megatron_utils.update_weight.hf_weight_iterator import HfWeightIterator

        for chunk in self.model:
            for buffer in chunk.buffers + chunk.expert_parallel_buffers:
                gather_reduced_shards(buffer)
        weights = named_params_and_buffers(self.args, self.model)
        # buffers, such as a router's bias, have none and stand for themselves
        gradients = {name: getattr(parameter, "main_grad", parameter) for name, parameter in weights}
        self.gradients.append(_named(HfWeightIterator(self.args, self.model).chunks(gradients)))
        return self.inner.prepare_grads()


def gather_reduced_shards(buffer: Any) -> None:
    """The distributed optimizer leaves each rank its shard of the reduced gradients: bring them together."""
    group = buffer.data_parallel_group
    for bucket in buffer.buckets:
        shard = bucket.grad_data.view(group.size(), -1)[group.rank()].clone()
        dist.all_gather_into_tensor(bucket.grad_data, shard, group=group)


def _named(chunks: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for chunk in chunks for name, tensor in chunk}


def rank_rollout(args: Namespace, case: Case, model: Sequence[Any]) -> dict[str, Any]:
    """This data-parallel rank's share, as the actor fetches it."""
    from megatron.core import parallel_state as mpu

    from slime.backends.megatron_utils.data import prepare_rollout_data

    columns = whole_rollout(case.rollout)
    if case.permuted:
        order = [step * BATCH + (5 * i + 3) % BATCH for step in range(STEPS) for i in range(BATCH)]
        columns = {name: [column[i] for i in order] for name, column in columns.items()}
    parallel = {
        "dp_size": mpu.get_data_parallel_world_size(),
        "cp_size": mpu.get_context_parallel_world_size(),
        "vpp_size": mpu.get_virtual_pipeline_model_parallel_world_size() or 1,
        "microbatch_group_size_per_vp_stage": model[0].config.microbatch_group_size_per_vp_stage,
    }
    schedule = build_dp_schedule(
        args, parallel, columns["total_lengths"], global_batch_size=BATCH, rollout_indices=list(range(STEPS * BATCH))
    )
    rank = mpu.get_data_parallel_rank()
    data: dict[str, Any] = {name: [column[i] for i in schedule.partitions[rank]] for name, column in columns.items()}
    data["micro_batch_indices"] = schedule.micro_batch_indices[rank]
    data["num_microbatches"] = schedule.num_microbatches
    data["global_batch_sizes"] = schedule.global_batch_sizes
    if case.rollout == "half_empty" and parallel["dp_size"] > 1 and "--micro-batch-size 1" in case.batching:
        assert (sum(data["response_lengths"]) == 0) == (rank % 2 == 1), "the case should have a rank without responses"
    return prepare_rollout_data(data, torch.device("cpu"), takes_images=args.vision_tower != "off")


def whole_rollout(kind: str) -> dict[str, list[Any]]:
    """The columns of all samples, the same on every rank."""
    generator = torch.Generator().manual_seed(3)
    lengths = LENGTHS * STEPS
    if kind == "half_empty":
        lengths = [(total, 0 if i % 2 else response) for i, (total, response) in enumerate(lengths)]
    masks = [(torch.rand(n, generator=generator) > 0.2).int() for _, n in lengths]
    for step in range(STEPS):
        masks[step * BATCH + MASKED].zero_()
    columns = {
        "tokens": [torch.randint(0, VOCAB, (total,), generator=generator) for total, _ in lengths],
        "total_lengths": [total for total, _ in lengths],
        "response_lengths": [n for _, n in lengths],
        "loss_masks": masks,
        "rollout_mask_sums": [mask.sum().float() for mask in masks],
        "rewards": torch.randn(len(lengths), generator=generator).tolist(),
    }
    return add_images(columns) if kind == "images" else columns


def save_reference(model: str, rollout: str, model_dir: str, path: str, layout: str = "") -> None:
    """One process, one sample per micro-batch. With all responses every weight must have a gradient to compare."""
    outcome = run_case(Case(model, layout, rollout=rollout), model_dir)
    assert len(outcome.metrics) == len(outcome.gradients) == STEPS
    for gradients in outcome.gradients:
        may_idle = model != "qwen3_moe"  # other routers leave experts of this batch without a token
        for name, gradient in gradients.items():
            if may_idle and ".experts." in name:
                continue
            assert rollout == "half_empty" or gradient.abs().max() > SMALLEST, f"{name}: {gradient.abs().max()}"
    torch.save(outcome, path)


def compare(case: Case, model_dir: str, path: str) -> dict[str, float]:
    """Run the case and compare with the reference; the largest relative differences.

    Raises:
        AssertionError: naming the step and the tensor that differs.
    """
    return compare_outcomes(run_case(case, model_dir), torch.load(path, weights_only=False), case.tolerance)


def compare_outcomes(got: Outcome, expected: Outcome, tolerance: float) -> dict[str, float]:
    """The largest relative differences; AssertionError naming the step and the tensor that differs."""
    worst = {"gradient": 0.0}
    for step, (ours, reference) in enumerate(zip(got.gradients, expected.gradients, strict=True)):
        difference = _compare_tensors(f"step {step}, gradient of", ours, reference, tolerance)
        worst["gradient"] = max(worst["gradient"], difference)
    worst["parameter"] = _compare_tensors("after three steps,", got.parameters, expected.parameters, tolerance)
    for step, (metrics, reference) in enumerate(zip(got.metrics, expected.metrics, strict=True)):
        _compare_metrics(f"step {step}", metrics, reference, tolerance)
    return worst


def _compare_tensors(
    what: str, ours: Mapping[str, Tensor], reference: Mapping[str, Tensor], tolerance: float
) -> float:
    assert ours.keys() == reference.keys(), ours.keys() ^ reference.keys()
    worst = 0.0
    for name, expected in reference.items():
        largest = expected.abs().max().clamp(min=SMALLEST)
        difference = ((ours[name] - expected).abs().max() / largest).item()
        assert difference <= tolerance, f"{what} {name} differs by {difference:.1e} of its largest element"
        worst = max(worst, difference)
    return worst


def _compare_metrics(step: str, ours: Mapping[str, float], reference: Mapping[str, float], tolerance: float) -> None:
    """Where the loss is known (the last pipeline stage) all of them, elsewhere those that every rank has."""
    from megatron.core import parallel_state as mpu

    # how many parameter groups the optimizer has depends on whether experts are spread
    ours, reference = (
        {name: value for name, value in metrics.items() if not name.startswith("train/lr-pg_")}
        for metrics in (ours, reference)
    )
    missing = reference.keys() - ours.keys()
    assert ours.keys() <= reference.keys(), ours.keys() - reference.keys()
    assert not (missing and mpu.is_pipeline_last_stage(ignore_virtual=True)), missing
    for name, value in ours.items():
        assert abs(value - reference[name]) <= 1e-6 + tolerance * abs(reference[name]), (
            f"{step}: {name} is {value}, not {reference[name]}"
        )
