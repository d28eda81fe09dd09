"""The order in which settings are resolved and checked."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable

from slime.utils.arguments.rules import (
    algorithm,
    architecture,
    batches,
    engine,
    evaluation,
    experts,
    layers,
    loading,
    lora,
    parallel,
    pending,
    placement,
    precision,
    run,
    topology,
    vision,
    weight_sync,
)
from slime.utils.arguments.rules.context import Context

Rule = Callable[[Context], None]

SLIME_RULES: tuple[Rule, ...] = (
    pending.check_pending,
    placement.resolve_modes,
    topology.resolve_external_engines,
    placement.resolve_devices,
    topology.resolve_deployment,
    placement.require_devices,
    placement.resolve_offload,
    loading.resolve_loading,
    loading.resolve_dumps,
    lora.resolve_lora,
    batches.resolve_batches,
    algorithm.resolve_algorithm,
    evaluation.resolve_evaluation,
    loading.check_loading,
    loading.check_saving,
    loading.check_dumps,
    lora.check_lora,
    placement.check_devices,
    topology.check_deployment,
    placement.check_driver,
    weight_sync.check_weight_sync,
    batches.check_batches,
    batches.check_lengths,
    batches.check_prompt_data,
    algorithm.check_algorithm,
    evaluation.check_evaluation,
)

TRAINER_RULES: tuple[Rule, ...] = (
    architecture.resolve_architecture,
    parallel.resolve_parallel,
    parallel.check_parallel,
    layers.check_layers,
    vision.resolve_vision,
    lora.check_lora_layers,
    experts.resolve_experts,
    experts.check_experts,
    batches.check_micro_batches,
    precision.report_device_limits,
)

ENGINE_RULES: tuple[Rule, ...] = (
    architecture.resolve_engine_vocabulary,
    engine.resolve_engine,
    engine.check_engine,
)

RUN_RULES: tuple[Rule, ...] = (precision.resolve_precision, run.resolve_run)


def rules_for(args: Namespace) -> tuple[Rule, ...]:
    """The rules for the parts that the run has."""
    trainer = () if args.debug_rollout_only else TRAINER_RULES
    engines = () if args.debug_train_only or args.load_debug_rollout_data else ENGINE_RULES
    return (*SLIME_RULES, *RUN_RULES, *trainer, *engines)


def apply_rules(context: Context, rules: tuple[Rule, ...]) -> None:
    """Run the rules in order.

    Raises:
        ConfigError: with the problems of all of them.
    """
    for rule in rules:
        rule(context)
    context.problems.raise_if_any()
