"""Scenarios of test_saving.py: background saves, retention, other layouts, and saves that are killed."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint_scenarios import ROLLOUTS, SAVED_ROLLOUT, resume, same, save_dir, train_rollouts, weights_of
from megatron_tiny import init_layout, make_args, train_step
from weight_scenarios import EP2, PP2, PP2_VPP2, TP2, assert_same_weights, expect

from slime.backends.megatron_utils.checkpoint import (
    CheckpointSaver,
    load_checkpoint,
    save_checkpoint,
    saved_weight_version,
)
from slime.backends.megatron_utils.checkpoint_directory import TRACKER_FILE, complete_iterations
from slime.backends.megatron_utils.checkpoint_optimizer import create_missing_moments, optimizer_parts
from slime.backends.megatron_utils.optimizer import initialize_model_and_optimizer
from slime.rollout.data_source import state_path

KILLS = 20
MIDDLE_OF_A_SAVE = 5


def scenario_background(context: dict[str, str]) -> None:
    """What is saved is the state at the call, whatever training does to it while the thread writes."""
    source, directory = Path(context["models"]) / "qwen3", save_dir(context, f"background_{dist.get_world_size()}")
    args = make_args(source, save=directory)
    init_layout(args)
    *state, _ = initialize_model_and_optimizer(args)
    train_rollouts(args, tuple(state), 0, SAVED_ROLLOUT + 1)
    saver = CheckpointSaver(args, *state)
    saver.save(SAVED_ROLLOUT, in_background=True, weight_version=17)
    draws = [random.random(), torch.rand(1).item()]
    expected = [*train_rollouts(args, tuple(state), SAVED_ROLLOUT + 1, ROLLOUTS), draws]
    assert not Path(directory, TRACKER_FILE).exists(), "nobody has asked for it yet"
    deadline = time.monotonic() + 30
    while not Path(directory, TRACKER_FILE).exists():
        assert time.monotonic() < deadline
        saver.advance()
        dist.barrier()
    args = make_args(source, load=directory)
    actual = resume(args)
    assert actual == expected, f"resumed {actual}\nuninterrupted {expected}"
    assert saved_weight_version(args) == 17
    assert saved_weight_version(make_args(source, load=directory, finetune=True)) == 0


def scenario_failing_writer(context: dict[str, str]) -> None:
    """A disk that refuses the last rank's files: every rank raises, and what was there before stays."""
    source, directory = Path(context["models"]) / "qwen3", save_dir(context, f"failing_{dist.get_world_size()}")
    args = make_args(source, save=directory)
    init_layout(args)
    *state, _ = initialize_model_and_optimizer(args)
    saver = CheckpointSaver(args, *state)
    saver.save(0)
    last = dist.get_world_size() - 1
    with _file_size_limit(100_000 if dist.get_rank() == last else None):
        saver.save(1, in_background=True)
        saver._pending._thread.join()
    expect(RuntimeError, f"iter_0000001 could not be written: rank {last}: ", saver.advance)
    assert Path(directory, TRACKER_FILE).read_text() == "0" and complete_iterations(Path(directory)) == [0]
    assert load_checkpoint(args, *state, directory) == 0
    with _file_size_limit(100_000 if dist.get_rank() == last else None):
        expect(RuntimeError, f"rank {last}: ", lambda: saver.save(1))
    saver.save(1)
    assert load_checkpoint(args, *state, directory) == 1


@contextlib.contextmanager
def _file_size_limit(size: int | None) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if size is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def scenario_retention(context: dict[str, str]) -> None:
    """The newest checkpoints stay, the others go with their data states; each save is whole though the plan of the
    first is used again."""
    source, root = Path(context["models"]) / "qwen3_tied", Path(save_dir(context, f"keep_{dist.get_world_size()}"))
    args = make_args(source, save=str(root), keep_checkpoints=2)
    init_layout(args)
    *state, _ = initialize_model_and_optimizer(args)
    saver, saved = CheckpointSaver(args, *state), {}
    for iteration in (2, 5, 9, 12, 13):
        train_step(args, *state, iteration)
        if dist.get_rank() == 0:
            _write_data_state(root, iteration)
        saver.save(iteration, in_background=iteration % 2 == 0)
        saved[iteration] = weights_of(args, state[0])
    saver.finish()
    assert complete_iterations(root) == [12, 13]
    assert sorted(path.name for path in (root / "rollout").iterdir()) == [
        "global_dataset_state_dict_12.pt",
        "global_dataset_state_dict_13.pt",
    ]
    for iteration in (12, 13):
        assert load_checkpoint(args, *state, root, ckpt_step=iteration) == iteration
        assert same(weights_of(args, state[0]), saved[iteration])
    # A run that goes back to an older checkpoint must not lose it to newer numbers.
    args.keep_checkpoints = 1
    load_checkpoint(args, *state, root, ckpt_step=12)
    CheckpointSaver(args, *state).save(12)
    assert complete_iterations(root) == [12, 13] and Path(root, TRACKER_FILE).read_text() == "12"


def _write_data_state(root: Path, iteration: int) -> None:
    path = state_path(root, iteration)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"")


def check_moves(context: dict[str, str], model: str, layouts: list[str]) -> None:
    """Weights, float32 main weights and Adam's moments are the same numbers after each change of layout."""
    source = Path(context["models"]) / model
    previous: Path | None = None
    for number, layout in enumerate(layouts):
        directory = save_dir(context, f"moves_{model}_{layouts}_{number}")
        args = make_args(source, save=directory, load=previous and str(previous.parent), flags=f"{layout} --bf16")
        init_layout(args)
        *state, iteration = initialize_model_and_optimizer(args)
        if previous is None:
            train_rollouts(args, tuple(state), 0, 1)
        else:
            assert iteration == 0
        written = save_checkpoint(args, 0, *state)
        if previous is not None:
            before, after = stored_tensors(previous), stored_tensors(written)
            assert any("exp_avg_sq" in name for name in before)
            assert_same_weights(before, after)
        previous = written
        train_step(args, *state, 7)  # the loaded state can be trained on


def stored_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """All whole tensors of a torch_dist checkpoint."""
    import torch.distributed.checkpoint as dcp

    metadata = dcp.FileSystemReader(str(directory)).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if hasattr(entry, "size")
    }
    dcp.load(tensors, storage_reader=dcp.FileSystemReader(str(directory)), no_dist=True)
    return tensors


def scenario_moves_dense(context: dict[str, str]) -> None:
    check_moves(context, "qwen3_tied", [TP2, "", PP2, PP2_VPP2, TP2])


def scenario_moves_moe(context: dict[str, str]) -> None:
    check_moves(context, "qwen3_moe", [EP2, "", PP2, EP2])


def kill_saves(rank: int, size: int, store: str, context: dict[str, str]) -> None:
    """Processes that save one checkpoint after the other, each killed at a random moment.

    A process is a fork of this one, so it costs only the building of a tiny model. It first loads what the killed
    ones left, and checks that every number in it is the one that was saved.
    """
    args = make_args_alone(Path(context["models"]) / "qwen3", save=context["killed"])
    vars(args).update(load=args.save, keep_checkpoints=2)
    dice, interrupted = random.Random(7), 0
    for number in range(KILLS):
        moment = dice.uniform(0, 2)
        interrupted += _kill_one_saver(args, f"{store}_{number}", moment, in_background=number % 2 == 1)
    assert interrupted >= MIDDLE_OF_A_SAVE, f"only {interrupted} of {KILLS} kills interrupted a save"
    assert complete_iterations(Path(args.save)), "no save has ended before its process did"
    status = _wait(_fork(lambda ready: _join_and_load(args, f"{store}_last"))[0])
    assert status == 0, "what is left does not load"


def make_args_alone(source: Path, **attributes: Any) -> Any:
    """`make_args` for one process that has not joined a group."""
    from megatron_tiny import RUN_FLAGS

    from slime.utils.arguments import parse_args

    args = parse_args(argv=f"--hf-checkpoint {source} --actor-num-gpus-per-node 1 {RUN_FLAGS}".split())
    args.finetune, args.no_load_optim, args.no_load_rng = False, False, False
    vars(args).update(attributes)
    return args


def _kill_one_saver(args: Any, store: str, moment: float, in_background: bool) -> bool:
    """Start a saver and kill it `moment` saves after its first one; whether a save was under way."""
    pid, progress = _fork(lambda progress: _save_for_ever(args, store, progress, in_background))
    times = []
    for _ in range(2):  # how long a save takes, on this machine at this time
        assert os.read(progress, 1) == b"+", f"the saving process ended with status {_wait(pid)}"
        times.append(time.monotonic())
    os.close(progress)
    time.sleep(moment * (times[1] - times[0]))
    os.kill(pid, signal.SIGKILL)
    assert _wait(pid) == -signal.SIGKILL, "it must not end by itself"
    return any(Path(args.save).glob(".iter_*"))


def _save_for_ever(args: Any, store: str, progress: int, in_background: bool) -> None:
    *state, iteration = _join_and_load(args, store)
    saver = CheckpointSaver(args, *state)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    while True:
        with contextlib.suppress(BrokenPipeError):
            os.write(progress, b"+")
        iteration += 1
        _fill(state, float(iteration))
        saver.save(iteration, in_background=in_background)


def _join_and_load(args: Any, store: str) -> list[Any]:
    """The model, its optimizer and schedule, and the iteration of the last complete checkpoint."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    init_layout(args)
    if not Path(args.load, TRACKER_FILE).exists():
        args.load = None
    *state, iteration = initialize_model_and_optimizer(args)
    if iteration >= 0:
        for tensor in _numbers(state):
            assert torch.all(tensor == float(iteration)), f"iteration {iteration} holds {tensor.unique()}"
    return [*state, iteration]


def _fill(state: list[Any], value: float) -> None:
    for tensor in _numbers(state):
        tensor.detach().fill_(value)


def _numbers(state: list[Any]) -> list[torch.Tensor]:
    """The weights, and Adam's moments of them."""
    model, optimizer, _ = state
    create_missing_moments(optimizer)
    parts = optimizer_parts(optimizer)
    moments = [moment for part in parts for entry in part.optimizer.state.values() for moment in entry.values()]
    return [
        *(parameter for chunk in model for parameter in chunk.parameters()),
        *(moment for moment in moments if isinstance(moment, torch.Tensor) and moment.dim() > 0),
    ]


def _fork(action: Any) -> tuple[int, int]:
    """A child that runs `action(write end of a pipe)`; its id and the read end."""
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return pid, read
    status = 1
    try:
        action(write)
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(status)


def _wait(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
