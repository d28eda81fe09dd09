"""Scenarios of test_vision.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import layout_matrix
import torch
import torch.distributed as dist
from checkpoint_scenarios import check_other_layout, check_stored_weights
from layout_matrix import Case, GradientRecorder
from megatron_tiny import init_layout, make_args
from weight_scenarios import EP2, PP2, TP2, check_round_trip

FROZEN, TRAINED = "--vision-tower frozen", "--vision-tower trained"
SP = "--sequence-parallel"
CP2 = "--context-parallel-size 2"


def scenario_round_trip(context: dict[str, str]) -> None:
    """Text logits and the export, tower included."""
    for layout in {1: [""], 2: [f"{TP2} {SP}", PP2]}[dist.get_world_size()]:
        check_round_trip(context, "vision", flags=f"{FROZEN} {layout}")
    if dist.get_world_size() == 1:
        check_round_trip(context, "vision_experts", flags=FROZEN)
        check_round_trip(context, "vision")  # the same directory as a text model
    else:
        check_round_trip(context, "vision_experts", flags=f"{FROZEN} {EP2}")


def scenario_images(context: dict[str, str]) -> None:
    """Logits and every gradient equal transformers', with the sequences in one pack or one by one."""
    for layout in {1: ["", "single"], 2: [f"{TP2} {SP}", TP2, PP2, CP2]}[dist.get_world_size()]:
        single = layout == "single"
        check_images(context, "vision", "" if single else layout, packed=not single)
    if dist.get_world_size() == 2:
        check_images(context, "vision_experts", f"{TP2} {SP} --expert-tensor-parallel-size 2", packed=True)


def check_images(context: dict[str, str], name: str, layout: str, packed: bool) -> None:
    """One forward and backward pass over the sequences of `images.pt` through the trainer's own batches."""
    source = Path(context["models"]) / name
    args = make_args(source, flags=f"{TRAINED} {layout}", data_pad_size_multiplier=8)
    init_layout(args)
    from slime.backends.megatron_utils.optimizer import initialize_model_and_optimizer

    model, optimizer, _, _ = initialize_model_and_optimizer(args)
    reference = torch.load(source / "images.pt")
    logits = _run(args, model, reference, packed)
    if logits is not None:
        for ours, theirs in zip(logits, reference["logits"], strict=True):
            difference = (ours - theirs).abs().max().item()
            assert difference < 1e-4, f"{layout}: logits differ by {difference}"
    recorder = GradientRecorder(args, model, optimizer)
    recorder.prepare_grads()
    _compare_gradients(recorder.gradients[0], reference["gradients"], layout)


def _run(args: Any, model: Any, reference: dict[str, Any], packed: bool) -> list[torch.Tensor] | None:
    """Whole logits of each sequence on the last stage, after the backward pass of the sum of their squares."""
    from megatron.core import parallel_state as mpu
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    from slime.backends.megatron_utils.data import DataIterator, get_batch
    from slime.backends.megatron_utils.model import FORWARD_KEYS, _run_chunk

    count = len(reference["tokens"])
    data = {"tokens": reference["tokens"], "multimodal_train_inputs": reference["inputs"]}
    order = [[0, 1, 2]] if packed else [[i] for i in range(count)]
    outputs: list[torch.Tensor] = []

    def step(iterator: DataIterator, chunk: Any) -> tuple[torch.Tensor, Any]:
        batch = get_batch(iterator, FORWARD_KEYS, args.data_pad_size_multiplier)
        lengths = [len(tokens) for tokens in batch["unconcat_tokens"]]
        return _run_chunk(chunk, batch), lambda logits: _loss(logits, batch, lengths)

    def _loss(logits: torch.Tensor, batch: dict[str, Any], lengths: list[int]) -> tuple[torch.Tensor, dict[str, Any]]:
        real = logits[0][~batch["padding_mask"][0]]
        rank = mpu.get_tensor_model_parallel_rank()
        shown = max(0, min(logits.shape[-1], args.vocab_size - rank * logits.shape[-1]))
        if args.context_parallel_size == 1:
            outputs.extend(
                gather_from_tensor_model_parallel_region(real.detach())[:, : args.vocab_size].split(lengths)
            )
        return real[:, :shown].square().sum() * len(order), {}  # Megatron takes the mean over micro-batches

    for chunk in model:
        chunk.zero_grad_buffer()
    model[0].config.finalize_model_grads_func = finalize_model_grads
    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[DataIterator(data, order)],
        model=list(model),
        num_microbatches=len(order),
        seq_length=1,
        micro_batch_size=1,
        forward_only=False,
    )
    last = mpu.is_pipeline_last_stage(ignore_virtual=True)
    return outputs if last and args.context_parallel_size == 1 else None


def _compare_gradients(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], layout: str) -> None:
    towers = 0
    for name, expected in theirs.items():
        if ".mlp.experts." in name:  # transformers stacks them in memory, and not in files
            continue
        largest = expected.abs().max().clamp(min=1e-3)
        difference = ((ours[name] - expected).abs().max() / largest).item()
        assert difference < 1e-4, (
            f"{layout}: the gradient of {name} differs by {difference:.1e} of its largest element"
        )
        towers += name.startswith("model.visual.") and expected.abs().max() > 1e-3
    assert towers > 20


def scenario_stored(context: dict[str, str]) -> None:
    """A checkpoint with the tower reads as the live model's export; one of TP2 loads under PP2, optimizer included."""
    check_stored_weights(context, "vision", f"{FROZEN} {TP2}")
    check_other_layout(context, f"{TRAINED} {TP2}", f"{TRAINED} {PP2}", model="vision")


def scenario_references(context: dict[str, str]) -> None:
    layout_matrix.save_reference("vision", "images", f"{context['models']}/vision", context["reference"], TRAINED)


def scenario_layout(context: dict[str, str], case: Case) -> None:
    layout_matrix.compare(case, f"{context['models']}/{case.model}", context["reference"])


def scenario_frozen(context: dict[str, str]) -> None:
    """A frozen tower stays as it is, and the text model's gradients are those beside a trained one."""
    case = Case("vision", FROZEN, rollout="images")
    outcome = layout_matrix.run_case(case, f"{context['models']}/vision")
    expected = torch.load(context["reference"], weights_only=False)
    source = _weights(Path(context["models"]) / "vision")
    for name, gradient in outcome.gradients[0].items():
        if name.startswith("model.visual."):
            assert torch.equal(outcome.parameters[name], source[name]), name
        else:
            reference = expected.gradients[0][name]
            assert torch.allclose(gradient, reference, rtol=1e-4, atol=1e-6), name


def scenario_critic(context: dict[str, str]) -> None:
    """A critic sees as well: its values of packed samples are those of single ones, and depend on the images."""
    from slime.backends.megatron_utils.data import get_data_iterator
    from slime.backends.megatron_utils.loss import get_values
    from slime.backends.megatron_utils.model import forward_only
    from slime.backends.megatron_utils.optimizer import initialize_model_and_optimizer

    values = []
    for batching in ("--micro-batch-size 1", "--micro-batch-size 8"):
        case = Case("vision", f"{FROZEN} --advantage-estimator ppo", batching, rollout="images")
        args = layout_matrix.case_args(case, f"{context['models']}/vision")
        args.loss_type = "value_loss"
        init_layout(args)
        model, *_ = initialize_model_and_optimizer(args, "critic")
        data = layout_matrix.rank_rollout(args, case, model)
        iterator, counts = get_data_iterator(data), data["num_microbatches"]
        values.append(torch.cat(forward_only(get_values, args, model, iterator, counts)["values"]))
    for sample in data["multimodal_train_inputs"]:
        if sample:
            sample["pixel_values"].zero_()
    blind = torch.cat(forward_only(get_values, args, model, iterator, counts)["values"])
    assert torch.allclose(values[0], values[1], atol=1e-5)
    assert (values[1] - blind).abs().max() > 1e-3


def _weights(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")
