"""The dry run as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from slime.utils.dry_run.batches import Batches
from slime.utils.dry_run.engine_memory import EngineMemory
from slime.utils.dry_run.memory import Memory, TrainerMemory
from slime.utils.dry_run.placement import Device
from slime.utils.dry_run.settings import Setting

_COORDINATES = ("dp", "pp", "cp", "tp", "ep")


def settings_lines(settings: Iterable[Setting]) -> Iterator[str]:
    shown = list(settings)
    width = max((len(setting.name) for setting in shown), default=0)
    for setting in shown:
        origin = f"  ({setting.origin})" if setting.origin else ""
        yield f"  {setting.name:{width}} = {setting.value!r}{origin}"


def placement_lines(devices: Sequence[Device]) -> Iterator[str]:
    if not devices:
        yield "  no devices"
    for device in devices:
        runs = [_trainer(device.trainer, device.has_critic), _engine(device.engine)]
        shown = ", ".join(part for part in runs if part) or "nothing"
        yield f"  bundle {device.bundle} (node {device.node}, device {device.device}): {shown}"


def batch_lines(batches: Batches | None) -> Iterator[str]:
    if batches is None:
        yield "  nothing is trained"
        return
    yield (
        f"  {batches.prompts_per_rollout} prompts x {batches.samples_per_prompt} samples = "
        f"{batches.samples_per_rollout} samples per rollout"
    )
    yield (
        f"  {batches.samples_per_rollout} samples / {batches.samples_per_step} per step = "
        f"{batches.steps_per_rollout} optimiser steps per rollout"
    )
    yield (
        f"  {batches.samples_per_step} samples / {batches.data_parallel_size} data-parallel ranks = "
        f"{batches.samples_per_rank_and_step} samples per rank and step"
    )
    longest = f"samples of {batches.longest_sample} tokens" if batches.longest_sample else "the samples"
    if batches.micro_batches_per_step is None:
        yield "  micro-batches are packed by tokens; how many depends on the lengths of the samples (no limit is set)"
    else:
        yield f"  {batches.micro_batches_per_step} micro-batches per rank and step for {longest}"
    if batches.tokens_per_micro_batch is not None:
        yield f"  at most {batches.tokens_per_micro_batch} tokens per device and micro-batch, padding included"
    if batches.total_steps is not None:
        yield f"  {batches.num_rollouts} rollouts: {batches.total_steps} optimiser steps in all"


def memory_lines(memory: Memory) -> Iterator[str]:
    if memory.trainer is not None:
        yield from _trainer_lines("trainer", memory.trainer)
    if memory.critic is not None:
        yield from _trainer_lines("critic", memory.critic)
    if memory.engine is not None:
        yield from _engine_lines(memory.engine)
    if memory.trainer is not None and memory.engine is not None:
        yield "  they take turns on their devices" if memory.take_turns else "  both stay in memory"
    yield "  (without activations, communication buffers and what allocators hold back)"


def bytes_text(count: int) -> str:
    """`1234567` as `1.2 MiB`."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.1f} {units[0]}" if units[0] != "B" else f"{count} B"


def _trainer_lines(name: str, trainer: TrainerMemory) -> Iterator[str]:
    trained = "" if trainer.trained == trainer.parameters else f", {trainer.trained:,} of them in adapters that train"
    yield f"  {name}, largest rank (pipeline stage {trainer.stage}, {trainer.parameters:,} parameters{trained}):"
    yield f"    weights          {bytes_text(trainer.weights)}"
    yield f"    gradients        {bytes_text(trainer.gradients)}"
    yield f"    optimiser state  {bytes_text(trainer.optimizer_state)}"
    if trainer.log_prob_buffers is None:
        yield "    log-prob buffers unknown: no limit on the length of samples"
    else:
        yield f"    log-prob buffers {bytes_text(trainer.log_prob_buffers)}"
    yield f"    together         {bytes_text(trainer.total)}, and {bytes_text(trainer.host_copies)} of host memory"


def _engine_lines(engine: EngineMemory) -> Iterator[str]:
    yield "  engine, per device:"
    yield f"    weights          {bytes_text(engine.weights)}"
    per_token = f"{bytes_text(engine.kv_bytes_per_token)} per token"
    if engine.kv_cache is not None:
        yield f"    KV cache         {bytes_text(engine.kv_cache)} ({engine.kv_tokens} tokens, {per_token})"
    else:
        fraction = f"{engine.static_fraction:g} of the device" if engine.static_fraction else "SGLang's own share"
        yield f"    KV cache         {per_token}; weights and cache together take {fraction}"


def _trainer(coordinates: dict[str, int] | None, has_critic: bool) -> str:
    if coordinates is None:
        return ""
    place = " ".join(f"{name} {coordinates[name]}" for name in _COORDINATES if name in coordinates)
    roles = "actor and critic" if has_critic else "trainer"
    return f"{roles} rank {coordinates['rank']} ({place})"


def _engine(part: dict[str, int] | None) -> str:
    return "" if part is None else f"engine {part['engine']} (rank {part['rank']})"
