"""Scenarios of test_checkpoint.py: what is saved, what comes back, and that training goes on unchanged."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron_tiny import init_layout, make_args, train_step
from weight_scenarios import EP2, PP2, PP2_VPP2, TP2, assert_same_weights, expect

from slime.backends.megatron_utils.checkpoint import load_checkpoint, save_checkpoint
from slime.backends.megatron_utils.families import ModelShape, family_of_checkpoint, read_hf_config
from slime.backends.megatron_utils.hf_checkpoint_saver import save_hf_model_to_path
from slime.backends.megatron_utils.megatron_to_hf.torch_dist import read_hf_tensors
from slime.backends.megatron_utils.optimizer import initialize_model_and_optimizer, setup_model_and_optimizer
from slime.backends.megatron_utils.update_weight.common import named_params_and_buffers
from slime.backends.megatron_utils.update_weight.hf_weight_iterator import HfWeightIterator
from slime.utils.reloadable_process_group import (
    destroy_process_groups,
    monkey_patch_torch_dist,
    reload_process_groups,
)

STEPS_PER_ROLLOUT = 2
SAVED_ROLLOUT = 3
ROLLOUTS = 7


def train_rollouts(args: Any, state: tuple[Any, Any, Any], first: int, last: int) -> list[list[float]]:
    """Loss, gradient norm and learning rate of every step of the rollouts first..last-1."""
    steps = range(first * STEPS_PER_ROLLOUT, last * STEPS_PER_ROLLOUT)
    return [train_step(args, *state, step) for step in steps]


def train_and_save(args: Any) -> list[list[float]]:
    """An uninterrupted run that saves after one of its rollouts; returns the steps that follow the save."""
    init_layout(args)
    *state, _ = initialize_model_and_optimizer(args)
    train_rollouts(args, tuple(state), 0, SAVED_ROLLOUT + 1)
    save_checkpoint(args, SAVED_ROLLOUT, *state)
    draws = [random.random(), torch.rand(1).item()]
    return [*train_rollouts(args, tuple(state), SAVED_ROLLOUT + 1, ROLLOUTS), draws]


def resume(args: Any) -> list[list[float]]:
    """The same steps after a fresh start from the checkpoint."""
    init_layout(args)
    random.seed(0)
    *state, iteration = initialize_model_and_optimizer(args)
    assert iteration == SAVED_ROLLOUT, iteration
    draws = [random.random(), torch.rand(1).item()]
    return [*train_rollouts(args, tuple(state), iteration + 1, ROLLOUTS), draws]


def check_exact_resume(context: dict[str, str], model: str, flags: str = "") -> None:
    source, directory = Path(context["models"]) / model, save_dir(context, f"exact_{model}_{flags}")
    expected = train_and_save(make_args(source, save=directory, flags=flags))
    actual = resume(make_args(source, load=directory, flags=flags))
    assert actual == expected, f"resumed {actual}\nuninterrupted {expected}"
    rates = [step[2] for step in expected[:-1]]
    assert len(set(rates)) == len(rates), "the learning rate should move, else this test sees nothing"


def check_other_layout(context: dict[str, str], saved: str, loaded: str, model: str = "qwen3_tied") -> None:
    source, directory = Path(context["models"]) / model, save_dir(context, f"other_{model}_{saved}_{loaded}")
    # as many samples per step under either layout
    expected = train_and_save(make_args(source, save=directory, flags=saved))
    actual = resume(make_args(source, load=directory, flags=loaded))
    for before, after in zip(expected[:-1], actual[:-1], strict=True):
        assert abs(before[0] - after[0]) < 1e-4 and before[2] == after[2], (
            f"resumed {actual}\nuninterrupted {expected}"
        )


def save_dir(context: dict[str, str], name: str) -> str:
    clean = "".join(char if char.isalnum() else "_" for char in name)
    return str(Path(context["out"]) / clean)


def weights_of(args: Any, model: Any) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in named_params_and_buffers(args, model)}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def scenario_resume_one_process(context: dict[str, str]) -> None:
    check_exact_resume(context, "qwen3_tied")


def scenario_resume_bf16(context: dict[str, str]) -> None:
    """float32 main weights come back too, not only their bf16 images."""
    check_exact_resume(context, "qwen3", flags="--bf16")


def scenario_resume_moe(context: dict[str, str]) -> None:
    check_exact_resume(context, "qwen3_moe")


def scenario_resume_dp2(context: dict[str, str]) -> None:
    check_exact_resume(context, "qwen3")


def scenario_resume_tp2(context: dict[str, str]) -> None:
    check_exact_resume(context, "qwen3_tied", flags=TP2)


def scenario_resume_pp2_vpp2(context: dict[str, str]) -> None:
    check_exact_resume(context, "qwen3_tied", flags=PP2_VPP2)


def scenario_resume_ep2(context: dict[str, str]) -> None:
    check_exact_resume(context, "qwen3_moe", flags=EP2)


def scenario_tp2_to_pp2(context: dict[str, str]) -> None:
    check_other_layout(context, TP2, PP2)


def scenario_pp2_to_tp2(context: dict[str, str]) -> None:
    check_other_layout(context, PP2, TP2)


def check_stored_weights(context: dict[str, str], model: str, flags: str) -> None:
    """What `megatron_to_hf.torch_dist` reads from a checkpoint is what the live model exports."""
    source, directory = Path(context["models"]) / model, save_dir(context, f"stored_{model}")
    args = make_args(source, save=directory, flags=flags)
    init_layout(args)
    *state, _ = initialize_model_and_optimizer(args)
    train_rollouts(args, tuple(state), 0, 1)
    path = save_checkpoint(args, 0, *state)
    live = dict(named for chunk in HfWeightIterator(args, state[0]).chunks() for named in chunk)
    shape = ModelShape.from_hf(read_hf_config(source))
    chunks = list(read_hf_tensors(path, family_of_checkpoint(source), shape, max_bytes=50_000))
    assert len(chunks) > 2
    assert_same_weights(live, dict(named for chunk in chunks for named in chunk))


def scenario_stored_tp2(context: dict[str, str]) -> None:
    check_stored_weights(context, "qwen3_tied", TP2)


def scenario_stored_ep2(context: dict[str, str]) -> None:
    check_stored_weights(context, "qwen3_moe", EP2)


def scenario_after_sleep(context: dict[str, str]) -> None:
    """Export, save and resume work on groups that were destroyed and rebuilt. Patches torch: for ranks of its own."""
    monkey_patch_torch_dist()
    for model, flags in (("qwen3_tied", PP2), ("qwen3", "")):
        source, directory = Path(context["models"]) / model, save_dir(context, f"sleep_{model}")
        args = make_args(source, save=directory, load=None, flags=flags)
        init_layout(args)
        *state, _ = initialize_model_and_optimizer(args)
        train_step(args, *state, 0)
        iterator = HfWeightIterator(args, state[0])
        before = {name: tensor.clone() for chunk in iterator.chunks() for name, tensor in chunk}
        destroy_process_groups()
        reload_process_groups()
        assert_same_weights(before, dict(named for chunk in iterator.chunks() for named in chunk))
        save_checkpoint(args, 0, *state)
        expected = train_step(args, *state, 1)
        assert load_checkpoint(args, *state, directory) == 0
        assert train_step(args, *state, 1) == expected


def scenario_which_iteration(context: dict[str, str]) -> None:
    """C1, C4: the tracker's iteration, `ckpt_step`, one `iter_*` directory; loading a reference changes no flag."""
    source, directory = Path(context["models"]) / "qwen3", save_dir(context, "which")
    args = make_args(source, save=directory)
    init_layout(args)
    *state, _ = initialize_model_and_optimizer(args)
    saved = {}
    for iteration in (2, 5, 9):
        train_step(args, *state, iteration)
        save_checkpoint(args, iteration, *state)
        saved[iteration] = weights_of(args, state[0])
    assert sorted(p.name for p in Path(directory).iterdir()) == [
        "iter_0000002",
        "iter_0000005",
        "iter_0000009",
        "latest_checkpointed_iteration.txt",
    ]
    args = make_args(source, load=directory, ckpt_step=5)
    model, optimizer, scheduler, iteration = initialize_model_and_optimizer(args)
    assert iteration == 5 and same(weights_of(args, model), saved[5])
    before = [group["lr"] for group in optimizer.param_groups]
    assert load_checkpoint(args, model, None, None, directory, weights_only=True) == -1
    assert same(weights_of(args, model), saved[9]), "the reference is the newest iteration"
    assert args.ckpt_step == 5 and [group["lr"] for group in optimizer.param_groups] == before
    assert load_checkpoint(args, model, optimizer, scheduler) == 5
    assert load_checkpoint(args, model, None, None, f"{directory}/iter_0000002", weights_only=True) == -1
    assert same(weights_of(args, model), saved[2])
    args.ckpt_step = 7
    expect(FileNotFoundError, "iter_0000009", lambda: load_checkpoint(args, model, optimizer, scheduler))


def scenario_warm_start(context: dict[str, str]) -> None:
    """`finetune` takes weights only and starts at rollout 0; a missing optimizer is an error; num_rollout 0 works."""
    source, directory = Path(context["models"]) / "qwen3", save_dir(context, "warm")
    args = make_args(source, save=directory, no_save_optim=True)
    init_layout(args)
    *state, _ = initialize_model_and_optimizer(args)
    train_step(args, *state, 0)
    train_step(args, *state, 1)  # the first step of the warm-up has a learning rate of 0
    save_checkpoint(args, 1, *state)
    trained = weights_of(args, state[0])
    args = make_args(source, load=directory)
    expect(ValueError, "--no-load-optim", lambda: initialize_model_and_optimizer(args))
    args = make_args(source, load=directory, finetune=True, no_load_optim=True, no_load_rng=True)
    model, optimizer, scheduler, iteration = initialize_model_and_optimizer(args)
    assert iteration == -1 and scheduler.num_steps == 0 and same(weights_of(args, model), trained)
    args = make_args(source, load=directory, no_load_optim=True)
    *state, iteration = initialize_model_and_optimizer(args)
    assert iteration == 1 and state[2].num_steps == 0
    args = make_args(source, load=directory, num_rollout=0)
    model, optimizer, scheduler, iteration = initialize_model_and_optimizer(args)
    assert optimizer is None and scheduler is None and iteration == 1 and same(weights_of(args, model), trained)


def scenario_refuses(context: dict[str, str]) -> None:
    """Another architecture, another schedule without a flag that decides, a broken tracker file."""
    source, directory = Path(context["models"]) / "qwen3", save_dir(context, "refuses")
    args = make_args(source, save=directory)
    init_layout(args)
    *state, _ = initialize_model_and_optimizer(args)
    train_step(args, *state, 0)
    save_checkpoint(args, 0, *state)
    expect(
        ValueError,
        "ffn_hidden_size is 112 there and 96 here",
        lambda: initialize_model_and_optimizer(make_args(source, load=directory, ffn_hidden_size=96)),
    )
    longer = {"load": directory, "num_rollout": 20}
    expect(ValueError, "lr_decay_steps", lambda: initialize_model_and_optimizer(make_args(source, **longer)))
    *_, scheduler, _ = initialize_model_and_optimizer(
        make_args(source, use_checkpoint_opt_param_scheduler=True, **longer)
    )
    assert scheduler.lr_decay_steps == 80 and scheduler.num_steps == 4
    args = make_args(source, override_opt_param_scheduler=True, lr=5e-3, **longer)
    _, optimizer, scheduler, _ = initialize_model_and_optimizer(args)
    assert scheduler.lr_decay_steps == 160 and scheduler.num_steps == 4
    assert optimizer.param_groups[0]["lr"] == 5e-3 * 4 / 16, "the new rate, at the saved place in the warm-up"
    Path(directory, "latest_checkpointed_iteration.txt").write_text("seven\n")
    expect(ValueError, "seven", lambda: initialize_model_and_optimizer(make_args(source, load=directory)))


def scenario_save_is_quick(context: dict[str, str]) -> None:
    """No helper process is started for a save: it takes well under the seconds that one costs."""
    source, directory = Path(context["models"]) / "qwen3", save_dir(context, "quick")
    args = make_args(source, save=directory)
    init_layout(args)
    *state, _ = initialize_model_and_optimizer(args)
    train_step(args, *state, 0)
    save_checkpoint(args, 0, *state)
    used = time.process_time()
    started = time.monotonic()
    save_checkpoint(args, 1, *state)
    print(f"save took {time.monotonic() - started:.2f} s, {time.process_time() - used:.2f} s of CPU")
    assert time.process_time() - used < 2.0


def scenario_export_replaces(context: dict[str, str]) -> None:
    """A second export to one path replaces the first; a path that can't be written fails on every rank."""
    source, target = Path(context["models"]) / "qwen3", Path(save_dir(context, "export"))
    args = make_args(source, update_weight_buffer_size=1 << 30)
    init_layout(args)
    model, _, _ = setup_model_and_optimizer(args)
    save_hf_model_to_path(args, target, model)
    first = (target / "model.safetensors").read_bytes()
    load_checkpoint(args, model, None, None)
    save_hf_model_to_path(args, target, model)
    assert (target / "model.safetensors").read_bytes() != first
    if dist.get_rank() == 0:
        (target.parent / "a_file").write_text("")
    expect(RuntimeError, "a_file", lambda: save_hf_model_to_path(args, target.parent / "a_file" / "below", model))
