"""Training checkpoints in Megatron's torch_dist format, saved atomically and resumed exactly.

Layout of a checkpoint directory: `iter_%07d/` per save, `latest_checkpointed_iteration.txt` with the newest iteration
(or `release` for converted weights without training state, in `release/`).
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from slime.backends.megatron_utils import atomic_directory
from slime.backends.megatron_utils.checkpoint_directory import (
    RELEASE,
    TRACKER_FILE,
    is_megatron_checkpoint,
    iteration_directory,
    resolve_iteration,
)
from slime.backends.megatron_utils.checkpoint_optimizer import fit_optimizer_state
from slime.backends.megatron_utils.checkpoint_saving import CheckpointSaver, write_torch_dist
from slime.backends.megatron_utils.checkpoint_state import (
    architecture_differences,
    generate_state,
    parallel_layout,
    restore_scheduler,
    sharding_metadata,
)
from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights, supports_hf_weight_loading
from slime.backends.megatron_utils.lora.checkpoint import base_state_dict, has_adapters, restore_adapters
from slime.backends.megatron_utils.lora.identity import KEY as LORA_IDENTITY
from slime.backends.megatron_utils.lora.identity import check_identity, check_no_adapters
from slime.backends.megatron_utils.lora.peft_format import load_adapter
from slime.backends.megatron_utils.rng_state import set_rng_state
from slime.backends.megatron_utils.update_weight.common import unwrap_model
from slime.backends.megatron_utils.value_head import take_missing_value_heads

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

__all__ = [
    "RELEASE",
    "TRACKER_FILE",
    "CheckpointSaver",
    "is_megatron_checkpoint",
    "iteration_directory",
    "load_checkpoint",
    "resolve_iteration",
    "save_checkpoint",
    "saved_weight_version",
    "write_torch_dist",
]

logger = logging.getLogger(__name__)

NO_ITERATION = -1


def load_checkpoint(
    args: argparse.Namespace,
    model: Sequence[torch.nn.Module],
    optimizer: MegatronOptimizer | None,
    scheduler: OptimizerParamScheduler | None,
    path: str | Path | None = None,
    *,
    ckpt_step: int | None = None,
    weights_only: bool = False,
) -> int:
    """Load into `model` (and, when resuming, the optimizer, the schedule and the random state); all ranks take part.

    Args:
        path: a checkpoint directory, one `iter_*` directory, or a Hugging Face directory. Default: `args.load` at
            `args.ckpt_step`; without that the weights of `args.hf_checkpoint`. With LoRA a given path holds whole
            weights for the base; by default the base is `args.hf_checkpoint` and `args.load` has the adapters.
        ckpt_step: the iteration to load from `path`; default: the one in the tracker file.
        weights_only: leave the optimizer, the schedule and the random state alone (reference models).

    Returns:
        The iteration that the training state belongs to; -1 where there is none (Hugging Face weights, a `release`
        checkpoint, `args.finetune`): training then starts at rollout 0.

    Raises:
        FileNotFoundError: `path`, or the iteration in it, does not exist.
        ValueError: `path` is neither kind, or holds another architecture, or lacks the training state asked for.
    """
    adapters = path is None and has_adapters(model)
    if adapters:
        load_hf_weights(args, model, args.hf_checkpoint)
        if not is_megatron_checkpoint(args.load):
            return _start_adapters(args, model, optimizer)
    if path is None:
        path, ckpt_step = (args.load, args.ckpt_step) if args.load is not None else (args.hf_checkpoint, None)
    if is_megatron_checkpoint(path):
        return _load_torch_dist(args, model, optimizer, scheduler, Path(path), ckpt_step, weights_only, adapters)
    if not Path(path).exists():
        raise FileNotFoundError(f"checkpoint {path} does not exist")
    if not supports_hf_weight_loading(path):
        raise ValueError(
            f"{path} is neither a Megatron checkpoint (it has no {TRACKER_FILE}) nor a Hugging Face directory of a "
            "known model_type"
        )
    load_hf_weights(args, model, path)
    if optimizer is not None and not weights_only:
        optimizer.reload_model_params()
    _report("loaded the weights of %s", path)
    return NO_ITERATION


def _start_adapters(
    args: argparse.Namespace, model: Sequence[torch.nn.Module], optimizer: MegatronOptimizer | None
) -> int:
    """New adapters on the base, or those of `args.lora_load`."""
    if args.lora_load is not None:
        load_adapter(args.lora_load, args, model)
    if optimizer is not None:
        optimizer.reload_model_params()
    _report("adapters %s on the weights of %s", args.lora_load or "that are new", args.hf_checkpoint)
    return NO_ITERATION


def saved_weight_version(args: argparse.Namespace) -> int:
    """The number of the weights that the engines had when the checkpoint that the run resumes from was saved; 0 where
    there is none. Versions count on from it, as samples that were carried over refer to them."""
    from megatron.core import dist_checkpointing

    if args.finetune or not is_megatron_checkpoint(args.load):
        return 0
    directory = resolve_iteration(Path(args.load), args.ckpt_step)
    return int(dist_checkpointing.load_common_state_dict(str(directory)).get("weight_version", 0))


def save_checkpoint(
    args: argparse.Namespace,
    iteration: int,
    model: Sequence[torch.nn.Module],
    optimizer: MegatronOptimizer | None,
    scheduler: OptimizerParamScheduler | None,
) -> Path:
    """Write `args.save/iter_%07d` and point the tracker file at it; all ranks take part. Returns the directory.

    See `CheckpointSaver`, which training uses.
    """
    return CheckpointSaver(args, model, optimizer, scheduler).save(iteration)


def _load_torch_dist(
    args: argparse.Namespace,
    model: Sequence[torch.nn.Module],
    optimizer: MegatronOptimizer | None,
    scheduler: OptimizerParamScheduler | None,
    path: Path,
    ckpt_step: int | None,
    weights_only: bool,
    adapters: bool,
) -> int:
    from megatron.core import dist_checkpointing

    if dist.get_rank() == 0:
        atomic_directory.restore_replaced(path)
    dist.barrier()
    directory = resolve_iteration(path, ckpt_step)
    common = dist_checkpointing.load_common_state_dict(str(directory))
    _check_architecture(args, directory, common)
    if adapters:
        check_identity(args, directory, common.get(LORA_IDENTITY))
    else:
        check_no_adapters(directory, common.get(LORA_IDENTITY))
    resumes = not (weights_only or args.finetune or directory.name == RELEASE)
    with_optimizer = resumes and not args.no_load_optim and optimizer is not None
    if with_optimizer and "opt_param_scheduler" not in common:
        raise ValueError(f"{directory} was saved without the optimizer; load it with --no-load-optim or --finetune")
    state = generate_state(
        args,
        NO_ITERATION,
        model,
        optimizer if with_optimizer else None,
        scheduler,
        with_rng=resumes and not args.no_load_rng and _rng_fits(directory, common),
        metadata=sharding_metadata(dist_checkpointing.load_content_metadata(preloaded_state_dict=common)),
        is_loading=True,
        whole_weights=not adapters,
    )
    heads = take_missing_value_heads(args, state, directory)
    loaded = _read(args, state, directory)
    for key, head in heads.items():
        loaded[key].update(head)
    _restore_weights(loaded, model, adapters)
    _restore(args, loaded, optimizer, scheduler, with_optimizer=with_optimizer, weights_only=weights_only)
    _report("loaded %s%s", directory, "" if resumes else " (weights only)")
    return int(common["iteration"]) if resumes else NO_ITERATION


def _read(args: argparse.Namespace, state: dict[str, Any], directory: Path) -> dict[str, Any]:
    """The content of `directory` for the places that `state` names; data-parallel ranks share the reading."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper

    strategy = get_default_load_sharded_strategy(str(directory))
    replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if replicas.size() > 1 and args.ckpt_fully_parallel_load:
        strategy = FullyParallelLoadStrategyWrapper(strategy, replicas)
    return dist_checkpointing.load(state, str(directory), strategy, strict=args.dist_ckpt_strictness)


def _restore_weights(loaded: dict[str, Any], model: Sequence[torch.nn.Module], adapters: bool) -> None:
    for index, wrapped in enumerate(model):
        state, chunk = loaded["model" if len(model) == 1 else f"model{index}"], unwrap_model(wrapped)
        if adapters:
            restore_adapters(chunk, state)
        else:
            chunk.load_state_dict(base_state_dict(chunk, state))


@torch.no_grad()  # a float32 distributed optimizer copies into leaves that require gradients
def _restore(
    args: argparse.Namespace,
    loaded: dict[str, Any],
    optimizer: MegatronOptimizer | None,
    scheduler: OptimizerParamScheduler | None,
    *,
    with_optimizer: bool,
    weights_only: bool,
) -> None:
    if with_optimizer:
        assert optimizer is not None and scheduler is not None
        optimizer.load_state_dict(fit_optimizer_state(optimizer, loaded["optimizer"]))
        restore_scheduler(args, scheduler, loaded["opt_param_scheduler"])
    elif optimizer is not None and not weights_only:
        optimizer.reload_model_params()
    if "rng_state" in loaded:
        set_rng_state(loaded["rng_state"])


def _report(message: str, *values: object) -> None:
    """One log line for all ranks."""
    if dist.get_rank() == 0:
        logger.info(message, *values)


def _check_architecture(args: argparse.Namespace, directory: Path, common: dict[str, Any]) -> None:
    differences = architecture_differences(args, common.get("args"))
    if differences:
        raise ValueError(f"{directory} holds another architecture: {'; '.join(differences)}")


def _rng_fits(directory: Path, common: dict[str, Any]) -> bool:
    """Random state belongs to one parallel layout; under another one the run goes on with fresh, seeded streams."""
    saved = common.get("parallel_layout")
    if not common.get("has_rng_state"):
        logger.warning("%s holds no random state; it is not restored", directory)
        return False
    if saved != parallel_layout():
        logger.warning(
            "%s was saved under another parallel layout (%s, now %s): the random state is not restored",
            directory,
            saved,
            parallel_layout(),
        )
        return False
    return True
