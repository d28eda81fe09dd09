"""slime's own flags, one file per concern, in the order of the help text."""

from __future__ import annotations

from slime.utils.arguments.flag import Flag
from slime.utils.arguments.groups import (
    algorithm,
    checkpoint,
    cluster,
    config_files,
    data,
    debug,
    distillation,
    evaluation,
    fault_tolerance,
    lora,
    megatron_hooks,
    model,
    network,
    reward,
    rollout,
    teacher,
    tracking,
    weight_sync,
)

SLIME_FLAGS: tuple[Flag, ...] = tuple(
    entry
    for group in (
        config_files,
        cluster,
        model,
        lora,
        checkpoint,
        data,
        rollout,
        reward,
        evaluation,
        algorithm,
        distillation,
        weight_sync,
        network,
        fault_tolerance,
        tracking,
        debug,
        megatron_hooks,
        teacher,
    )
    for entry in group.FLAGS
)
