"""What a training checkpoint holds, as the state dict that Megatron's dist_checkpointing saves and loads."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from slime.backends.megatron_utils.checkpoint_optimizer import create_missing_moments
from slime.backends.megatron_utils.lora.checkpoint import has_adapters, sharded_adapters
from slime.backends.megatron_utils.lora.identity import KEY as LORA_IDENTITY
from slime.backends.megatron_utils.lora.identity import lora_identity
from slime.backends.megatron_utils.rng_state import get_rng_state
from slime.backends.megatron_utils.update_weight.common import unwrap_model
from slime.backends.megatron_utils.value_head import has_value_head

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

_ARCHITECTURE = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "num_experts",
    "untie_embeddings_and_output_weights",
)
_OF_ONE_PROCESS = ("rank", "local_rank", "run_id", "log_dir")


def generate_state(
    args: argparse.Namespace,
    iteration: int,
    model: Sequence[torch.nn.Module],
    optimizer: MegatronOptimizer | None,
    scheduler: OptimizerParamScheduler | None,
    *,
    with_rng: bool,
    metadata: dict[str, Any],
    is_loading: bool,
    whole_weights: bool = False,
    weight_version: int = 0,
) -> dict[str, Any]:
    """This rank's part; when loading, it says what to load where. Without `optimizer` the schedule is left out too.

    With LoRA it is the adapters' state, unless `whole_weights` asks for the base's.
    """
    state: dict[str, Any] = {
        "checkpoint_version": 3.0,
        "iteration": iteration,
        "weight_version": weight_version,
        "args": plain_args(args),
        "parallel_layout": parallel_layout(),
        "has_rng_state": with_rng,
    }
    adapters = has_adapters(model) and not whole_weights
    for index, chunk in enumerate(model):
        key = "model" if len(model) == 1 else f"model{index}"
        if adapters:
            state[key] = sharded_adapters(chunk)
        else:
            state[key] = unwrap_model(chunk).sharded_state_dict(metadata=metadata)
    if adapters:
        state[LORA_IDENTITY] = lora_identity(args)
    if optimizer is not None:
        assert scheduler is not None
        create_missing_moments(optimizer)
        state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=metadata)
        state["opt_param_scheduler"] = scheduler.state_dict()
    if with_rng:
        state["rng_state"] = _sharded_rng_state()
    return state


def sharding_metadata(saved: dict[str, Any] | None = None) -> dict[str, Any]:
    """How tensors are cut into shards: as `saved` says, else as we save.

    We save the optimizer's state so that another data, tensor or pipeline parallel layout can load it.
    """
    from megatron.core import parallel_state

    ours = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
    }
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return {**(ours if saved is None else saved), "dp_cp_group": group}


def parallel_layout() -> dict[str, int]:
    """Sizes of the parallel dimensions."""
    from megatron.core import parallel_state as ps

    return {
        "tensor": ps.get_tensor_model_parallel_world_size(),
        "pipeline": ps.get_pipeline_model_parallel_world_size(),
        "context": ps.get_context_parallel_world_size(),
        "data": ps.get_data_parallel_world_size(),
        "expert": ps.get_expert_model_parallel_world_size(),
    }


def plain_args(args: argparse.Namespace) -> argparse.Namespace:
    """The values of `args` that any reader can unpickle, alike on all ranks."""
    return argparse.Namespace(
        **{key: value for key, value in vars(args).items() if key not in _OF_ONE_PROCESS and _is_plain(value)}
    )


def architecture_differences(args: argparse.Namespace, saved: argparse.Namespace | None) -> list[str]:
    """ "name: saved value, this run's value" for each architecture flag in which they differ."""
    if saved is None:
        return []
    tied_matters = not has_value_head(args)  # a critic takes an actor's weights without its output layer
    return [
        f"{name} is {getattr(saved, name)} there and {getattr(args, name)} here"
        for name in _ARCHITECTURE
        if (tied_matters or name != "untie_embeddings_and_output_weights")
        and hasattr(saved, name)
        and hasattr(args, name)
        and getattr(saved, name) != getattr(args, name)
    ]


def restore_scheduler(args: argparse.Namespace, scheduler: OptimizerParamScheduler, saved: dict[str, Any]) -> None:
    """Continue the schedule where `saved` stood; the learning rates follow from it at once.

    Raises:
        ValueError: this run's schedule differs from the saved one, and no flag says which to follow.
    """
    ours = scheduler.state_dict()
    saved = saved | {name: ours[name] for name in _without_effect(ours) if name in saved}
    if not (args.override_opt_param_scheduler or args.use_checkpoint_opt_param_scheduler):
        differences = [
            f"{name} is {saved[name]} there and {ours[name]} here"
            for name in ours
            if name != "num_steps" and name in saved and saved[name] != ours[name]
        ]
        if differences:
            raise ValueError(
                f"the checkpoint's schedule (in samples) differs from this run's: {'; '.join(differences)}. "
                "--override-opt-param-scheduler takes this run's, --use-checkpoint-opt-param-scheduler the saved one"
            )
    if args.override_opt_param_scheduler:
        _follow_scheduler(scheduler)
    scheduler.num_steps = 0  # load_state_dict advances by the saved count
    scheduler.load_state_dict(saved)


def _without_effect(schedule: dict[str, Any]) -> list[str]:
    """Lengths that a schedule has but does not use: a run with more rollouts may follow one that is complete."""
    names = ["lr_decay_steps"] if schedule["lr_decay_style"] == "constant" else []
    return [*names, "wd_incr_steps"] if schedule["start_wd"] == schedule["end_wd"] else names


def _follow_scheduler(scheduler: OptimizerParamScheduler) -> None:
    """The optimizer's loaded groups carry the saved learning rates, which would win over the schedule's."""
    for group in scheduler.optimizer.param_groups:
        if group.get("default_config", True):
            group["max_lr"], group["min_lr"] = scheduler.max_lr, scheduler.min_lr


def _sharded_rng_state() -> Any:
    from megatron.core import parallel_state as ps
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    shape = (
        ps.get_pipeline_model_parallel_world_size(),
        ps.get_tensor_model_parallel_world_size(),
        ps.get_data_parallel_world_size(with_context_parallel=True),
    )
    place = (
        ps.get_pipeline_model_parallel_rank(),
        ps.get_tensor_model_parallel_rank(),
        ps.get_data_parallel_rank(with_context_parallel=True),
    )
    return ShardedObject("rng_state", get_rng_state(), shape, place, replica_id=0)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    return value is None or isinstance(value, bool | int | float | str)
